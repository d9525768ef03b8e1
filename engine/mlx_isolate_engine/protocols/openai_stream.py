"""The stream of chunks that OpenAI's chat and text completions share, whatever a chunk carries.

Opening chunks, deltas, a finish reason for each choice, usage if asked for, then `[DONE]`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mlx_isolate_engine.completion.events import CompletionSummary
from mlx_isolate_engine.protocols import openai_shapes as shapes
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_shared.errors import HttpError


class WriteChunk(Protocol):
    """Makes the event of one chunk of one choice."""

    def __call__(self, piece: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        """The event; `piece` is the choice without its last two fields."""
        ...


class Pieces(Protocol):
    """What differs between the two APIs: what a chunk's choice carries."""

    def nothing(self, index: int) -> dict[str, Any]:
        """The choice of a chunk that brings no text."""
        ...

    def opening(self, chunk: WriteChunk) -> Iterable[bytes]:
        """Events before the first delta."""
        ...

    def delta(self, index: int, delta: Delta, chunk: WriteChunk) -> Iterable[bytes]:
        """Events for one delta of one choice."""
        ...


class ChunkStream:
    """Formats the events of a streamed answer.

    Args:
        head: the fields that every chunk begins with.
        pieces: what the choices carry.
        choices: completions for each prompt of the request.
        include_usage: whether the client asked for the usage chunk.
    """

    def __init__(
        self, head: dict[str, Any], pieces: Pieces, *, choices: int, include_usage: bool
    ) -> None:
        self._head = head
        self._pieces = pieces
        self._choices = choices
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._summaries: dict[int, CompletionSummary] = {}

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        """What comes before the first delta."""
        return list(self._pieces.opening(self._chunk))

    def delta(self, index: int, delta: Delta) -> Iterable[bytes]:
        """The events of one delta."""
        return self._pieces.delta(index, delta, self._chunk)

    def finish(self, index: int, summary: CompletionSummary) -> Iterable[bytes]:
        """The chunk with the finish reason and the timings."""
        self._summaries[index] = summary
        choice = _choice(self._pieces.nothing(index), None, summary.finish_reason)
        return (self._event([choice], timings=summary.timings),)

    def end(self) -> Iterable[bytes]:
        """Usage, if asked for, and the end mark."""
        if self._usage:
            summaries = [self._summaries[index] for index in sorted(self._summaries)]
            usage = shapes.usage(by_prompt(summaries, self._choices))
            yield shapes.sse({**self._head, "choices": [], "usage": usage})
        yield shapes.DONE

    def error(self, error: HttpError) -> bytes:
        """The error envelope as an event."""
        return shapes.sse(error.envelope())

    def keepalive(self, done: int, total: int) -> bytes:
        """A comment."""
        return shapes.comment_keepalive(done, total)

    def _chunk(self, piece: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        return self._event([_choice(piece, logprobs, None)])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return shapes.sse({**self._head, "choices": choices, **self._usage, **more})


def by_prompt(
    summaries: Sequence[CompletionSummary], choices: int
) -> list[Sequence[CompletionSummary]]:
    """Summaries in groups of so many choices, one group a prompt."""
    return [summaries[at : at + choices] for at in range(0, len(summaries), choices)]


def _choice(
    piece: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {**piece, "logprobs": logprobs, "finish_reason": finish_reason}
