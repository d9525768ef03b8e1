"""What goes between RAM and the cold tier: restores one way, snapshots and spills the other.

Knows which entries are worth a write and which restore is worth its time; what RAM holds is the
prompt cache's business.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_isolate_engine.cache.cold_tier import ColdTier, Found
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.token_index import key_length
from mlx_isolate_engine.cache.write_behind import WriteBehind
from mlx_isolate_engine.cache.write_schedule import WriteSchedule
from mlx_isolate_shared.errors import CacheError
from mlx_isolate_shared.wire import CacheFigures

log = logging.getLogger(__name__)

# How often one take looks for another file after the one it found turned out to be unusable.
RESTORE_TRIES_MAX = 3


@dataclass(frozen=True, kw_only=True)
class ColdSettings:
    """The cold tier and how it is used.

    Attributes:
        write_behind: write what completions leave as soon as nobody generates; without it only
            what leaves RAM is written.
        spill_bytes_max: bytes that entries out of RAM and not yet written may hold.
        demote_idle_s: after so long without work RAM is given back; 0 = never.
    """

    tier: ColdTier
    choice: RestoreChoice
    write_behind: bool = True
    spill_bytes_max: int = 0
    debounce_s: float = 1.0
    demote_idle_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A prefix read from the cold tier: `tokens` of it, in `seconds` spent reading."""

    cache: list[Any]
    tokens: int
    seconds: float


class ColdSide:
    """The cold tier as the prompt cache uses it. Call `start` before anything else.

    Args:
        demote: hands over what RAM holds; returns whether anything changed.

    Attributes:
        tier: where entries outlive the process.
        writer: the thread that brings them there.
        choice: between restore and prefill.
    """

    def __init__(self, settings: ColdSettings, demote: Callable[[], bool]) -> None:
        self.tier = settings.tier
        self.choice = settings.choice
        schedule = WriteSchedule(
            debounce_s=settings.debounce_s, spill_bytes_max=settings.spill_bytes_max
        )
        self.writer = WriteBehind(
            settings.tier, schedule, demote_idle_s=settings.demote_idle_s, demote=demote
        )
        self._write_behind = settings.write_behind
        self._restores = 0
        self._restore_s = 0.0
        self._spills = 0

    def start(self) -> None:
        """Let the writer begin."""
        self.writer.start()

    def restore(
        self, namespace: str, key: bytes, in_ram: int, between: tuple[int, int]
    ) -> Generator[None, None, tuple[Restored | None, str]]:
        """A longer prefix than RAM has, if there is one and it is the cheaper way, and why or not.

        Args:
            in_ram: tokens that RAM gives.
            between: at least and at most so many tokens.
        """
        shortest, longest = between
        reason = "longest"
        if self.choice.mode == "never":
            return None, reason
        for _ in range(RESTORE_TRIES_MAX):
            found = self.tier.find(namespace, key, length_max=longest)
            if found is None or found.length < shortest or found.length <= in_ram:
                break
            choice = self.choice.choose(tokens_gained=found.length - in_ram, size=found.bytes)
            if not choice.restore:
                return None, choice.reason
            try:
                cache, seconds = yield from self._stream(found, room_for=key_length(key))
            except CacheError as error:
                reason = f"ssd_{getattr(error, 'reason', 'error')}"
                log.info("cache.restore_failed cause=%s", error)
                continue
            self._restores += 1
            self._restore_s += seconds
            self.choice.note_restore(found.bytes, seconds)
            return Restored(cache=cache, tokens=found.length, seconds=seconds), choice.reason
        return None, reason

    def _stream(
        self, found: Found, *, room_for: int
    ) -> Generator[None, None, tuple[list[Any], float]]:
        """Read an entry, yielding between tensors; the seconds are those spent reading."""
        reading = self.tier.restore(found, room_for=room_for)
        seconds = 0.0
        try:
            while True:
                start = time.perf_counter()
                try:
                    next(reading)
                except StopIteration as end:
                    cache: list[Any] = end.value
                    return cache, seconds + time.perf_counter() - start
                seconds += time.perf_counter() - start
                yield
        finally:
            reading.close()  # the caller may have given up between two tensors

    def is_dirty(self, entry: Entry) -> bool:
        """Whether an entry is worth a write: it can be stored and is not."""
        cuttable = entry.cuttable
        return entry.storable and not self.tier.has(entry.namespace, entry.key, cuttable=cuttable)

    def hand_down(self, entry: Entry, evicted: Sequence[Entry], absorbed: Sequence[Entry]) -> None:
        """RAM has taken `entry`, which stands for `absorbed` too, and `evicted` had to leave."""
        if self._write_behind and entry not in evicted and self.is_dirty(entry):
            self.writer.snapshot(entry, replaces=absorbed)
        else:
            for prefix in absorbed:
                self.writer.discard(prefix.namespace, prefix.key)
        self.spill(evicted)

    def spill(self, evicted: Sequence[Entry]) -> None:
        """These have left RAM."""
        for entry in evicted:
            if self.is_dirty(entry):
                self._spills += 1
                self.writer.spill(entry)
            else:
                self.writer.discard(entry.namespace, entry.key)

    def clear(self) -> int:
        """Forget every entry; returns how many there were."""
        self.writer.clear()
        return self.tier.clear()

    def add_figures(self, ram: CacheFigures) -> CacheFigures:
        """The figures of RAM, and this side's beside them."""
        stats = self.tier.stats()
        evidence = self.writer.evidence()
        return msgspec.structs.replace(
            ram,
            ssd_enabled=True,
            ssd_entries=stats.entries,
            ssd_bytes=stats.bytes,
            ssd_bytes_max=stats.bytes_max,
            restores=self._restores,
            restore_choices=dict(self.choice.made),
            restore_ms=self._restore_s * 1000,
            restore_bytes_per_s=self.choice.restore_bytes_per_s or 0.0,
            spills=self._spills,
            pending_snapshots=evidence.pending_snapshots,
            pending_spills=evidence.pending_spills,
            pending_spill_bytes=evidence.pending_spill_bytes,
            dropped_spills=evidence.dropped_spills,
            failed_writes=evidence.failed_writes,
            quarantined=stats.quarantined,
            longest_durable_prefix=stats.longest_prefix,
            ssd_trouble=stats.trouble,
        )
