"""A completion service without a model: scripted events, counted resources."""

import asyncio
from collections.abc import Sequence

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    FinishReason,
    Timings,
)
from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.completion.seam import Sink
from mlx_isolate_engine.identity import Identity
from mlx_isolate_engine.protocols.contract import Call
from mlx_isolate_shared.errors import EngineError, HttpError
from mlx_isolate_shared.wire import ModelFacts

FACTS = ModelFacts(
    architecture="scripted",
    parameters=1,
    weights_bytes=4,
    dtype="float32",
    context_length=4096,
    vocab_size=512,
    backend="none",
    has_chat_template=True,
)
IDENTITY = Identity(model="m", created=1, fingerprint="fp_0", facts=FACTS)
CALL = Call(identity=IDENTITY, request_id="r", unique="0", created=2)

Step = Event | asyncio.Event | HttpError | Exception


def content(*texts: str) -> list[Step]:
    return [ContentDelta(text=text) for text in texts]


def summary(
    finish_reason: FinishReason = "stop",
    *,
    prompt: int = 7,
    completion: int = 3,
    cached: int = 2,
    reasoning: int = 0,
    stop_string: str | None = None,
) -> CompletionSummary:
    timings = Timings(
        cache_n=cached,
        prompt_n=prompt - cached,
        prompt_ms=10.0,
        prompt_per_second=500.0,
        predicted_n=completion,
        predicted_ms=20.0,
        predicted_per_second=150.0,
    )
    return CompletionSummary(
        finish_reason=finish_reason,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
        stop_string=stop_string,
        timings=timings,
    )


class ScriptedService:
    """Gives every completion the same steps: an event is sent, an asyncio.Event awaited, an error
    raised.

    `stall_s` is how long a client may leave an event unread before its completion fails.

    Attributes:
        requests: what was prepared, in order.
        open: prepared completions that hold resources; 0 when nothing leaks.
        cancelled: executions that were cancelled.
        running: set while at least one execution has begun.
    """

    def __init__(
        self,
        steps: Sequence[Step] = (),
        ending: CompletionSummary | None = None,
        *,
        refusal: HttpError | None = None,
        stall_s: float | None = None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.notices = notices
        self._steps = list(steps)
        self._ending = ending or summary()
        self._refusal = refusal
        self.stall_s = stall_s
        self.requests: list[CompletionRequest] = []
        self.open = 0
        self.cancelled = 0
        self.running = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def prepare(self, request: CompletionRequest) -> "ScriptedCompletion":
        self.requests.append(request)
        if self._refusal is not None:
            raise self._refusal
        self.open += 1
        return ScriptedCompletion(self, self._steps, self._ending)

    async def count_tokens(self, request: CompletionRequest) -> int:
        self.requests.append(request)
        return self._ending.prompt_tokens


class ScriptedCompletion:
    def __init__(
        self, service: ScriptedService, steps: Sequence[Step], ending: CompletionSummary
    ) -> None:
        self._service = service
        self._steps = steps
        self._ending = ending
        self._is_open = True

    @property
    def prompt_tokens(self) -> int:
        return self._ending.prompt_tokens

    @property
    def notices(self) -> tuple[str, ...]:
        return self._service.notices

    async def execute(self, sink: Sink) -> CompletionSummary:
        self._service.running.set()
        try:
            for step in self._steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await self._hand_over(step, sink)
        except asyncio.CancelledError:
            self._service.cancelled += 1
            self._service.was_cancelled.set()
            raise
        finally:
            await self.close()
        return self._ending

    async def _hand_over(self, event: Event, sink: Sink) -> None:
        limit = asyncio.timeout(self._service.stall_s)
        try:
            async with limit:
                await sink(event)
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineError(
                "The client stopped reading.", status=504, code="client_stalled"
            ) from None

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._service.open -= 1
