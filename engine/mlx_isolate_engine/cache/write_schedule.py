"""Which entry is written next: snapshots with their debounce, spills in a capped queue; pure.

Takes `now`, does no I/O, holds no lock.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_isolate_engine.cache.ram_tier import Entry

# Pause after a failed write, doubling from the first to the second: a full disk is asked again,
# but not in a loop.
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0

Place = tuple[str, bytes]


@dataclass(eq=False)
class Pending:
    """An entry that waits to be written.

    Attributes:
        due: monotonic seconds before which it is not written.
        spilled: RAM no longer holds it, so that its bytes are held by the queue alone.
        flush: a flush waits for it: it is tried once without regard to pauses.
    """

    entry: Entry
    due: float
    spilled: bool
    flush: bool = False


class WriteSchedule:
    """All entries that are dirty: waiting, or being written now.

    Args:
        debounce_s: a snapshot waits so long for a newer one of the same tokens.
        spill_bytes_max: bytes that spilled entries may hold; above it the oldest is dropped.
    """

    def __init__(self, *, debounce_s: float, spill_bytes_max: int) -> None:
        self.debounce_s = debounce_s
        self.spill_bytes_max = spill_bytes_max
        self.dropped_spills = 0
        self.failed_writes = 0
        self._waiting: OrderedDict[Place, Pending] = OrderedDict()
        self._writing: Pending | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_FIRST_S

    def snapshot(
        self, entry: Entry, now: float, *, at_once: bool = False, replaces: Sequence[Place] = ()
    ) -> None:
        """Write this entry once its tokens have been left alone for the debounce time.

        Args:
            replaces: entries that it serves as well, which need not be written any more.
        """
        if self._writing is not None and self._writing.entry is entry:
            return  # if that fails it waits again
        place = (entry.namespace, entry.key)
        gone = [item for each in (place, *replaces) if (item := self._waiting.pop(each, None))]
        flush = any(item.flush for item in gone)
        due = now if at_once or flush else now + self.debounce_s
        self._waiting[place] = Pending(entry, due, spilled=False, flush=flush)

    def spill(self, entry: Entry, now: float) -> None:
        """RAM has let go of an entry that is not durable."""
        if self._writing is not None and self._writing.entry is entry:
            self._writing.spilled = True
            return
        place = (entry.namespace, entry.key)
        previous = self._waiting.pop(place, None)
        flush = previous is not None and previous.flush
        self._waiting[place] = Pending(entry, now, spilled=True, flush=flush)
        for oldest, item in list(self._waiting.items()):
            if self.spill_bytes <= self.spill_bytes_max:
                break
            if item.spilled:
                del self._waiting[oldest]
                self.dropped_spills += 1

    def discard(self, namespace: str, key: bytes) -> None:
        """This entry need not be written any more."""
        self._waiting.pop((namespace, key), None)

    def clear(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()

    def begin_flush(self, now: float) -> None:
        """Make everything that waits due at once, each to be tried once whatever failed before."""
        for item in self._all():
            item.due = min(item.due, now)
            item.flush = True

    @property
    def is_writing(self) -> bool:
        """Whether the entry taken last is still being written."""
        return self._writing is not None

    @property
    def is_flushed(self) -> bool:
        """Whether each entry that a flush waits for was written or has failed."""
        return not any(item.flush for item in self._all())

    def next(self, now: float) -> Pending | None:
        """Take the next entry to write: spills first (they hold memory), then what is due."""
        if self._writing is not None:
            return None
        paused = now < self._retry_at
        ready = [
            (place, item)
            for place, item in self._waiting.items()
            if item.due <= now and (item.flush or not paused)
        ]
        if not ready:
            return None
        place, item = min(ready, key=lambda pair: (not pair[1].spilled, pair[1].due))
        del self._waiting[place]
        self._writing = item
        return item

    def wait_s(self, now: float) -> float | None:
        """Seconds until something may be due; None when nothing waits."""
        if not self._waiting or self._writing is not None:
            return None
        earliest = min(item.due for item in self._waiting.values())
        return max(0.0, max(earliest, self._retry_at) - now)

    def written(self) -> None:
        """The entry taken last is durable, or can never be."""
        self._writing = None
        self._retry_s = RETRY_FIRST_S

    def failed(self, now: float) -> None:
        """The entry taken last was not written; what RAM still holds stays dirty and waits."""
        item = self._writing
        assert item is not None, "nothing was being written"
        self._writing = None
        self.failed_writes += 1
        self._retry_at = now + self._retry_s
        self._retry_s = min(RETRY_MAX_S, self._retry_s * 2)
        if item.spilled:
            self.dropped_spills += 1
            return
        item.due = self._retry_at
        item.flush = False
        self._waiting.setdefault((item.entry.namespace, item.entry.key), item)

    @property
    def pending_snapshots(self) -> int:
        """Entries in RAM that are not durable yet, the one being written included."""
        return sum(not item.spilled for item in self._all())

    @property
    def pending_spills(self) -> int:
        """Entries out of RAM that are not durable yet, the one being written included."""
        return sum(item.spilled for item in self._all())

    @property
    def spill_bytes(self) -> int:
        """Bytes that pending spills hold."""
        return sum(item.entry.bytes for item in self._all() if item.spilled)

    def _all(self) -> list[Pending]:
        writing = [self._writing] if self._writing is not None else []
        return [*writing, *self._waiting.values()]
