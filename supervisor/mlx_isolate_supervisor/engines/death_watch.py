"""Tells at once that a process is being killed, while the kernel still takes it down (Linux).

A process ends thread by thread. The last thread drops its memory, which takes about 60 ms a GB,
and only after that are its sockets closed and its parent is told. All the other threads are gone
within a millisecond or few. So two of them are watched, of which at most one can be the last: the
end of either says that the process is ending, which its exit status in /proc confirms. (A handle
of the main thread would not do: since Linux 6.15 it speaks only when the whole process has ended.)

Where the kernel cannot tell (before Linux 6.9, on macOS, or of a process with fewer than two
threads beside its main one) nothing is told early, and the end of sockets and process is what
there is.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

# Threads beside the main one that are watched; with one it might be the one that drops the memory.
WATCHED_THREADS = 8
# Linux' PIDFD_THREAD: a handle of one thread.
_PIDFD_THREAD = os.O_EXCL
# Fields of /proc/PID/stat behind the command's name: the state, and the exit status (52nd in all).
_STATE, _EXIT_STATUS = 0, 49
_STOPPED = (b"T", b"t")


class DeathWatch:
    """Watches one child; every call comes on the event loop.

    Args:
        pid: a child that is not reaped before `close`.
        on_dying: gets its wait status once it is certain that none of its code runs any more.
        on_ended: it can be reaped.
    """

    def __init__(
        self, pid: int, *, on_dying: Callable[[int], None], on_ended: Callable[[], None]
    ) -> None:
        self._pid = pid
        self._on_dying = on_dying
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        # Handles by thread id.
        self._threads: dict[int, int] = {}
        self._is_possible = sys.platform == "linux"
        self._process = _open_handle(pid, 0) if self._is_possible else None
        if self._process is not None:
            self._loop.add_reader(self._process, self._process_ended)

    def watch_threads(self) -> None:
        """Watch the oldest threads that there are now, if not enough of them are watched yet.

        To be called when the process has the threads that it keeps, and then now and again: a
        watched thread may end by itself.
        """
        if not self._is_possible or len(self._threads) >= WATCHED_THREADS:
            return
        for thread in self._other_threads():
            if thread in self._threads:
                continue
            handle = _open_handle(thread, _PIDFD_THREAD)
            if handle is None:
                continue
            self._threads[thread] = handle
            self._loop.add_reader(handle, self._thread_ended, thread)
            if len(self._threads) >= WATCHED_THREADS:
                return

    def close(self) -> None:
        """Watch no more."""
        self._is_possible = False
        for thread in tuple(self._threads):
            self._drop_thread(thread)
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = None

    def _other_threads(self) -> list[int]:
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]
        except OSError:
            return []
        return sorted(thread for thread in threads if thread != self._pid)

    def _thread_ended(self, thread: int) -> None:
        self._drop_thread(thread)
        status = read_dying_status(self._pid)
        if status is not None:
            self._is_possible = False
            for other in tuple(self._threads):
                self._drop_thread(other)
            self._on_dying(status)

    def _drop_thread(self, thread: int) -> None:
        handle = self._threads.pop(thread)
        self._loop.remove_reader(handle)
        os.close(handle)

    def _process_ended(self) -> None:
        # It stays readable for ever.
        if self._process is not None:
            self._loop.remove_reader(self._process)
        self._on_ended()


def read_dying_status(pid: int) -> int | None:
    """The wait status of a process that is ending, not yet reaped; None if it is not seen to end.

    An exit with code 0 looks like no exit and is not seen.
    """
    try:
        # The command's name may hold spaces and brackets; nothing behind it does.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # Of a process that is stopped, the signal that stopped it stands there.
        return None if fields[_STATE] in _STOPPED else int(fields[_EXIT_STATUS]) or None
    except (OSError, IndexError):
        return None


def _open_handle(task: int, flags: int) -> int | None:
    """A descriptor that becomes readable at the end of `task`; None where there is none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.pidfd_open(task, flags)
    return None
