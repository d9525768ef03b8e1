"""What the server needs of every wire protocol: parse once, then format the same events."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.identity import Identity
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import HttpError

# What a stream carries; prefill progress becomes keepalives instead.
Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request as every protocol sees it.

    Attributes:
        request_id: echoed to the client and on every log line.
        unique: hexadecimal digits that no other answer has; request ids are the client's.
        created: seconds since the epoch.
    """

    identity: Identity
    request_id: str
    unique: str
    created: int


class Streamer(Protocol):
    """Turns one answer's events into complete SSE events, each as bytes with its blank line."""

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        """What precedes the first delta; `prompt_tokens` is the length of the (first) prompt."""
        ...

    def delta(self, index: int, delta: Delta) -> Iterable[bytes]:
        """A part of completion `index`."""
        ...

    def finish(self, index: int, summary: CompletionSummary) -> Iterable[bytes]:
        """The end of completion `index`."""
        ...

    def end(self) -> Iterable[bytes]:
        """What follows the last completion's end."""
        ...

    def error(self, error: HttpError) -> bytes:
        """The last event of an answer that failed after its headers were sent."""
        ...

    def keepalive(self, done: int, total: int) -> bytes:
        """Company for a client that waits, with prompt tokens processed of all."""
        ...


class WireRequest(Protocol):
    """A parsed request: what to generate, and how to say it."""

    @property
    def completions(self) -> tuple[CompletionRequest, ...]:
        """At least one; the place of each is its index in the answer."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of events."""
        ...

    def streamer(self) -> Streamer:
        """A formatter for the streamed answer."""
        ...

    def body(self, transcripts: Sequence[Transcript]) -> bytes:
        """The whole answer as JSON, from one ended transcript per completion."""
        ...


# Parses a request body; raises RequestError.
Parse = Callable[[bytes, Call], WireRequest]
