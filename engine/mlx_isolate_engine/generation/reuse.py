"""Prefix reuse as both lanes do it: what a row begins with, and what it leaves behind."""

from collections.abc import Generator, Sequence
from typing import Any

from mlx_isolate_engine.generation.plan import Checkpoint, PromptPlan
from mlx_isolate_engine.generation.ports import EntryKind, PromptCache
from mlx_isolate_engine.generation.row import Row

Found = tuple[list[Any] | None, int]


class PrefixReuse:
    """The prompt cache, or its absence.

    Args:
        cache: None = every prompt runs in full and nothing is kept.
        empty: a cache of the model with nothing in it, to tell its kind.
    """

    def __init__(self, cache: PromptCache | None, empty: Sequence[Any]) -> None:
        self._cache = cache
        self.wants_checkpoints = cache is not None and cache.wants_checkpoint(empty)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._cache is not None

    def find(self, row: Row) -> Generator[None, None, Found]:
        """The row's cached prefix and its length; yields while it comes from disk."""
        if self._cache is None:
            return None, 0
        return (yield from self._cache.take_stepwise(row.plan.prompt.tokens, row.plan.namespace))

    def checkpoints(self, prompt: PromptPlan, reused: int) -> list[Checkpoint]:
        """Where a prefill pauses: asked-for places, and always before the last token."""
        last = len(prompt.tokens) - 1
        ends = [each for each in prompt.checkpoints if reused < each.end < last]
        if not self.wants_checkpoints:
            ends = []
        if last > reused:
            ends.append(Checkpoint(end=last, kind="prompt"))
        return ends

    def keep(self, row: Row, tokens: Sequence[int], cache: Sequence[Any], kind: EntryKind) -> None:
        """Leave a row's cache, which holds `tokens`, to later prompts."""
        if self._cache is not None and tokens:
            self._cache.put(tokens, cache, row.plan.namespace, kind)

    def keep_checkpoint(
        self, row: Row, tokens: Sequence[int], cache: Sequence[Any], kind: EntryKind
    ) -> None:
        """The same in the middle of a completion, for kinds of cache that need it."""
        if self.wants_checkpoints:
            self.keep(row, tokens, cache, kind)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """How fast prompts run, for the choice between restoring and running."""
        if self._cache is not None:
            self._cache.note_prefill(tokens, seconds)
