"""The writer thread: brings dirty entries to the cold tier while nobody generates.

One coordinator owns debounce, retries, queue and flush. It asks before every tensor whether the
generation thread is idle and waits while it is not, so that the token loop shares neither disk nor
memory bandwidth with it. An entry stays dirty until the cold tier has returned from storing it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from mlx_isolate_engine.cache.cold_tier import ColdTier
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.write_schedule import Pending, WriteSchedule
from mlx_isolate_shared.errors import CacheError

log = logging.getLogger(__name__)

# Longest wait at the end for a write that was cut; it asks between pieces of a tensor, so only a
# disk that does not answer takes longer.
CUT_S = 5.0


class FlushEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a flush can prove: with `durable` nothing that was dirty when it began is only in RAM.

    Attributes:
        trouble: a sentence for a person where the last write was not possible, else empty.
    """

    durable: bool
    pending_snapshots: int = 0
    pending_spills: int = 0
    pending_spill_bytes: int = 0
    dropped_spills: int = 0
    failed_writes: int = 0
    refused_writes: int = 0
    entries: int = 0
    bytes: int = 0
    longest_durable_prefix: int = 0
    trouble: str = ""


class _WriteCut(Exception):
    """The writer is closing and its time is over, or the cache was cleared."""


class WriteBehind:
    """Schedule, thread and flush over one cold tier.

    Args:
        demote_idle_s: after so long without work `demote` is called; 0 = never.
        demote: hands over what RAM holds; returns whether anything changed.
    """

    def __init__(
        self,
        store: ColdTier,
        schedule: WriteSchedule,
        *,
        demote_idle_s: float = 0.0,
        demote: Callable[[], bool] | None = None,
    ) -> None:
        self._store = store
        self._schedule = schedule
        self._demote_idle_s = demote_idle_s
        self._demote = demote
        self._changed = threading.Condition()
        self._idle = True
        self._idle_since = time.monotonic()
        self._pauses = 0
        self._demoted = False
        self._closing = False
        self._cut = False
        self._abandoned = False
        self._warned = False
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_idle(self, idle: bool) -> None:
        """Tell whether the generation thread has nothing to do; cheap where nothing changed."""
        if idle == self._idle:
            return
        with self._changed:
            self._idle = idle
            self._demoted = False
            self._idle_since = time.monotonic()
            if idle:
                self._pauses += 1
                self._changed.notify_all()

    def snapshot(self, entry: Entry, replaces: Sequence[Entry] = ()) -> None:
        """An entry has come to RAM and shall be durable soon; it serves for what it replaces."""
        places = [(each.namespace, each.key) for each in replaces]
        with self._changed:
            self._schedule.snapshot(entry, time.monotonic(), replaces=places)
            self._demoted = False
            self._changed.notify_all()

    def spill(self, entry: Entry) -> None:
        """An entry has left RAM without being durable."""
        with self._changed:
            self._schedule.spill(entry, time.monotonic())
            self._changed.notify_all()

    def write_now(self, entry: Entry) -> None:
        """As `snapshot`, without the debounce."""
        with self._changed:
            self._schedule.snapshot(entry, time.monotonic(), at_once=True)
            self._changed.notify_all()

    def discard(self, namespace: str, key: bytes) -> None:
        """An entry need not become durable any more."""
        with self._changed:
            self._schedule.discard(namespace, key)

    def clear(self) -> None:
        """Nothing that waits need become durable any more; what is being written is given up."""
        with self._changed:
            self._schedule.clear()
            self._abandoned = True
            self._changed.notify_all()
            self._wait_until(lambda: not self._schedule.is_writing, time.monotonic() + CUT_S)
            self._abandoned = False

    def flush(self, timeout_s: float, gather: Callable[[], None]) -> FlushEvidence:
        """Wait until everything that is dirty now is durable; any thread but the generation's.

        Never disturbs a running completion: the writer goes on waiting for idleness. Returns at
        the latest after `timeout_s`, and earlier where each write that is left has failed, or
        where the writer is closing.

        Args:
            gather: hands over (write_now) what RAM alone holds.
        """
        deadline = time.monotonic() + timeout_s
        self._store.look_again()
        with self._changed:
            lost_before, pauses = self._lost, self._pauses
        gather()
        with self._changed:
            self._schedule.begin_flush(time.monotonic())
            self._changed.notify_all()
            # A completion that has been answered may still be on its way into the cache: it has
            # arrived once the generation thread has been idle.
            has_paused = self._wait_until(lambda: self._idle or self._pauses > pauses, deadline)
        gather()
        with self._changed:
            self._schedule.begin_flush(time.monotonic())
            self._changed.notify_all()
            self._wait_until(lambda: self._schedule.is_flushed or self._closing, deadline)
            is_flushed = has_paused and self._schedule.is_flushed
            return self._evidence(is_flushed and self._lost == lost_before)

    @property
    def _lost(self) -> tuple[int, int, int]:
        """What did not become durable so far: failed, dropped, never to be written."""
        return self._schedule.failed_writes, self._schedule.dropped_spills, self.refused

    def _wait_until(self, is_so: Callable[[], bool], deadline: float) -> bool:
        """Wait, with the lock held, for a condition; False at the deadline."""
        while not is_so():
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(timeout=left):
                return is_so()
        return True

    def evidence(self) -> FlushEvidence:
        """The same figures now; durable = nothing is dirty."""
        with self._changed:
            pending = self._schedule.pending_snapshots + self._schedule.pending_spills
            return self._evidence(pending == 0)

    def _evidence(self, durable: bool) -> FlushEvidence:
        stats = self._store.stats()
        return FlushEvidence(
            durable=durable,
            pending_snapshots=self._schedule.pending_snapshots,
            pending_spills=self._schedule.pending_spills,
            pending_spill_bytes=self._schedule.spill_bytes,
            dropped_spills=self._schedule.dropped_spills,
            failed_writes=self._schedule.failed_writes,
            refused_writes=self.refused,
            entries=stats.entries,
            bytes=stats.bytes,
            longest_durable_prefix=stats.longest_prefix,
            trouble=stats.trouble,
        )

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the generation thread to be done with what it is at."""
        with self._changed:
            return self._wait_until(lambda: self._idle, time.monotonic() + timeout_s)

    def close(self, timeout_s: float, gather: Callable[[], None]) -> FlushEvidence:
        """Flush, then end the thread; a write that is not done in time is cut and its file removed.

        The generation thread has ended or been told to: idleness is not waited for any more.
        """
        if not self._thread.is_alive():
            return self.evidence()
        self.set_idle(True)
        evidence = self.flush(timeout_s, gather)
        with self._changed:
            self._closing = self._cut = True
            self._changed.notify_all()
        self._thread.join(timeout=CUT_S)
        lost = evidence.pending_snapshots + evidence.pending_spills
        log.log(
            logging.WARNING if lost else logging.INFO,
            "cache.closed lost=%d dropped_spills=%d failed_writes=%d durable_entries=%d",
            lost,
            evidence.dropped_spills,
            evidence.failed_writes,
            evidence.entries,
        )
        return evidence

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """False when closing. In a frame of its own: what was written last may be gigabytes."""
        item = self._wait_next()
        if item is not None:
            self._write(item)
        return item is not None

    def _wait_next(self) -> Pending | None:
        """The next entry to write, None when closing; demotes when all has been idle long."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                item = self._schedule.next(now) if self._idle else None
                if item is not None:
                    return item
                if self._is_demotion_due(now):
                    self._demoted = True
                    demote = self._demote
                    assert demote is not None
                    self._changed.release()  # RAM's lock is never taken inside ours
                    try:
                        changed = demote()
                    finally:
                        self._changed.acquire()
                    self._demoted = self._demoted and not changed
                    continue
                self._changed.wait(timeout=self._pause_s(now))
            return None

    def _is_demotion_due(self, now: float) -> bool:
        return (
            self._demote is not None
            and self._demote_idle_s > 0
            and self._idle
            and not self._demoted
            and now - self._idle_since >= self._demote_idle_s
        )

    def _pause_s(self, now: float) -> float | None:
        """How long nothing can happen by itself; None = until somebody notifies."""
        if not self._idle:
            return None
        waits = [self._schedule.wait_s(now)]
        if self._demote is not None and self._demote_idle_s > 0 and not self._demoted:
            waits.append(max(0.0, self._idle_since + self._demote_idle_s - now))
        return min((w for w in waits if w is not None), default=None)

    def _write(self, item: Pending) -> None:
        try:
            self._store.store(item.entry, self._gate)
        except OSError as error:
            self._note_failure(error)
        except _WriteCut:
            with self._changed:
                if self._abandoned:
                    self._schedule.written()  # nobody wants it any more
                else:
                    self._schedule.failed(time.monotonic())
                self._changed.notify_all()
        except CacheError as error:
            log.info("cache.refused cause=%s", error)
            self._refuse()
        except Exception:
            # The last frame of this thread: one entry is lost, the thread lives on.
            log.exception("cache.write_broken")
            self._refuse()
        else:
            if self._warned:
                log.info("cache.writes_resumed")
                self._warned = False
            self._settle()

    def _refuse(self) -> None:
        self.refused += 1
        with self._changed:
            self._schedule.written()
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            self._schedule.written()
            self._demoted = False  # what has become durable may leave RAM
            self._changed.notify_all()

    def _note_failure(self, error: OSError) -> None:
        if not self._warned:  # one line, however long the disk stays full
            trouble = self._store.stats().trouble
            log.warning("cache.write_failed cause=%s", trouble or error.strerror)
            self._warned = True
        with self._changed:
            self._schedule.failed(time.monotonic())
            self._changed.notify_all()

    def _gate(self) -> None:
        if self._idle and not self._is_given_up:
            return
        with self._changed:
            while not self._idle and not self._is_given_up:
                self._changed.wait()
            if self._is_given_up:
                raise _WriteCut

    @property
    def _is_given_up(self) -> bool:
        """Whether what is being written shall end without a file."""
        return self._cut or self._abandoned
