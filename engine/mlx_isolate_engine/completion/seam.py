"""The execution seam as protocols see it: prepare, then execute or close."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from mlx_isolate_engine.completion.events import CompletionSummary, Event
from mlx_isolate_engine.completion.request import CompletionRequest

Sink = Callable[[Event], Awaitable[None]]


class PreparedCompletion(Protocol):
    """One admitted completion; owns its resources until it is executed or closed. Single use."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What of the request is not held, though it is answered; each one sentence."""
        ...

    async def execute(self, sink: Sink) -> CompletionSummary:
        """Run to the end, awaiting `sink` for each event in order.

        A slow sink holds back this completion only (back-pressure). Cancelling the task that
        awaits this cancels the completion within one step or one prefill chunk.

        Raises:
            EngineError: generation of this completion failed; other completions go on.
        """
        ...

    async def close(self) -> None:
        """Give the resources back without executing; harmless after execute."""
        ...


class CompletionService(Protocol):
    """What an engine offers to its protocols."""

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """Validate against the model, render, tokenize, resolve every setting, admit.

        Never blocks the event loop. All refusals happen here, before any response header.

        Raises:
            RequestError: 400 naming the field.
            CapacityError: 429 when the engine's own queue is full.
        """
        ...

    async def count_tokens(self, request: CompletionRequest) -> int:
        """Length of the request's prompt in tokens, without admitting anything."""
        ...
