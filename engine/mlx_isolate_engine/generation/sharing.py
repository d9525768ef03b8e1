"""Choices of one request share one prefill: the first runs the prompt, the others begin with a copy.

Knows nothing of batches; the lane says who waits, who runs and when a prompt has run.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_isolate_engine.cache import snapshot
from mlx_isolate_engine.cache.prompt_cache import TakeFacts
from mlx_isolate_engine.generation.reuse import Found
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_shared.errors import CacheError


class _Prefilled:
    def __init__(self, cache: list[Any], length: int, takers: int) -> None:
        self.cache = cache
        self.length = length
        self.takers = takers


class SharedPrefills:
    """What prompts of several choices have left behind, until the last choice has begun."""

    def __init__(self) -> None:
        self._kept: dict[str, _Prefilled] = {}

    def __len__(self) -> int:
        """Prompts kept now."""
        return len(self._kept)

    def is_wanted(self, row: Row, end: int) -> bool:
        """Whether others begin where this row is now, at token `end`."""
        group = row.plan.group
        is_whole = end == len(row.plan.prompt.tokens) - 1
        return group is not None and is_whole and group not in self._kept

    def keep(self, row: Row, cache: Sequence[Any], length: int) -> None:
        """A row's prompt has run but for its last token."""
        assert row.plan.group is not None
        try:
            kept = snapshot.keep(cache, length)
        except CacheError:
            return  # each runs it for itself
        self._kept[row.plan.group] = _Prefilled(kept, length, row.plan.choices - 1)

    def take(self, row: Row) -> Found | None:
        """What the row may begin with, for it to write to; None where nothing is kept for it."""
        group = row.plan.group
        found = self._kept.get(group) if group is not None else None
        if group is None or found is None:
            return None
        found.takers -= 1
        if found.takers <= 0:
            del self._kept[group]
        row.taken = TakeFacts(tier="ram", tokens=found.length, reason="same_request")
        return snapshot.hand_out(found.cache, found.length), found.length

    def has(self, row: Row) -> bool:
        """Whether the row could begin at the end of its prompt."""
        return row.plan.group in self._kept

    def forget_ended(self, alive: Iterable[Row]) -> None:
        """Give back what belongs to requests of which nobody is left."""
        groups = {row.plan.group for row in alive}
        for group in [each for each in self._kept if each not in groups]:
            del self._kept[group]

    def candidates(self, waiting: Sequence[Row], running: Iterable[Row]) -> list[Row]:
        """Of those who wait: all but choices whose prompt is being run by another choice.

        Args:
            running: rows whose prompt has begun and not ended.
        """
        busy = {row.plan.group for row in running} - {None}
        chosen: list[Row] = []
        for row in waiting:
            group = row.plan.group
            if group is None or self.has(row):
                chosen.append(row)
            elif group not in busy:
                busy.add(group)
                chosen.append(row)
        return chosen
