"""Log probabilities of sampled tokens, computed inside the step, and tied to the text they made."""

from collections import deque
from typing import Any

import mlx.core as mx

from mlx_isolate_engine.completion.events import TokenLogprob
from mlx_isolate_engine.generation.sampling import Sampler
from mlx_isolate_engine.generation.vocabulary import Vocabulary


class LogprobSampler:
    """Wraps a row's sampler and notes the log probability of what it drew, with alternatives.

    The figures join the step's own graph and are scheduled with it: asked for later, they would
    wait behind the next step.

    Args:
        inner: the row's sampler.
        top: alternatives for each token, 0..20.
    """

    def __init__(self, inner: Sampler, top: int) -> None:
        self._inner = inner
        self._top = top
        self._noted: deque[tuple[Any, Any, Any]] = deque()

    def __call__(self, logprobs: Any) -> Any:
        """[1, vocabulary] to [1]."""
        drawn = self._inner(logprobs)
        values = logprobs.astype(mx.float32)
        chosen = mx.take_along_axis(values, drawn[:, None], axis=-1)
        top = min(self._top, values.shape[-1])
        if top:
            best = mx.argsort(-values, axis=-1)[:, :top]
            best_values = mx.take_along_axis(values, best, axis=-1)
        else:
            best, best_values = mx.zeros((1, 0), mx.uint32), mx.zeros((1, 0))
        schedule: Any = mx.async_eval
        schedule(chosen, best, best_values)
        self._noted.append((chosen, best, best_values))
        return drawn

    def pop(self, token: int, vocabulary: Vocabulary) -> TokenLogprob:
        """The note of the oldest draw, which gave `token`."""
        chosen, best, best_values = self._noted.popleft()
        alternatives = zip(best[0].tolist(), best_values[0].tolist(), strict=True)
        return _token_logprob(
            vocabulary,
            token,
            chosen.item(),
            tuple(_token_logprob(vocabulary, other, value) for other, value in alternatives),
        )


def _token_logprob(
    vocabulary: Vocabulary, token: int, value: float, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    raw = vocabulary.raw(token)
    return TokenLogprob(
        token=raw.decode("utf-8", "replace"),
        raw=raw,
        # -inf has no form in JSON; OpenAI's own answer for "as good as never" is this.
        logprob=max(min(value, 0.0), -9999.0),
        top=top,
    )


class _Entry:
    """A token whose text is on its way: [start, end) in the raw text, and what was shown of it."""

    def __init__(self, logprob: TokenLogprob, piece: str, start: int, end: int) -> None:
        self.logprob = logprob
        self.piece = piece
        self.start = start
        self.end = end
        self.shown = ""

    def show(self, begin: int, end: int) -> None:
        self.shown += self.piece[max(0, begin - self.start) : max(0, end - self.start)]

    def closed(self) -> TokenLogprob:
        if self.shown == self.piece:
            return self.logprob
        return TokenLogprob(
            token=self.shown,
            raw=self.shown.encode(),
            logprob=self.logprob.logprob,
            top=self.logprob.top,
        )


class LogprobLedger:
    """Gives each piece of content the tokens that made it, so that their bytes join to it.

    The raw text runs through in order: every character is either taken (content) or skipped
    (markers, reasoning, tool calls). A token that is only partly content keeps that part's bytes.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._carried: list[TokenLogprob] = []
        self._written = 0
        self._position = 0

    def add(self, logprob: TokenLogprob, piece: str, *, is_partial: bool) -> None:
        """A token arrived that completes `piece`; partial if it also began a character."""
        start = self._written
        self._written += len(piece)
        end = self._written + is_partial
        self._entries.append(_Entry(logprob, piece, start, end))

    def take(self, length: int) -> tuple[TokenLogprob, ...]:
        """The next `length` characters are content; the tokens that they complete."""
        begin, end = self._advance(length)
        done, self._carried = self._carried, []
        for entry in self._entries:
            if entry.start >= end and entry.end > end:
                break
            entry.show(begin, end)
        while self._entries and self._entries[0].end <= end:
            done.append(self._entries.popleft().closed())
        return tuple(done)

    def skip(self, length: int) -> None:
        """The next `length` characters are not content."""
        _, end = self._advance(length)
        while self._entries and self._entries[0].end <= end:
            entry = self._entries.popleft()
            if entry.shown:
                self._carried.append(entry.closed())

    def finish(self) -> tuple[TokenLogprob, ...]:
        """Tokens of which a part was content, and whose rest will not come."""
        self._carried.extend(entry.closed() for entry in self._entries if entry.shown)
        self._entries.clear()
        return tuple(self._carried)

    def _advance(self, length: int) -> tuple[int, int]:
        begin = self._position
        self._position += length
        return begin, self._position
