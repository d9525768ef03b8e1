"""Runs all of an engine's work beside its main thread, which stays free and quick.

Python acts on signals in its main thread, whichever thread the system gives them to (Linux the main
one where it can, gVisor any). On Linux it is thus the one that prints the stacks when a crash is on
its way, before the kernel ends the process, and until then clients of the dead engine wait; so it
has nothing else to do and keeps its CPU priority, while all work has a lower one.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

NICENESS_MAX = 19


class StopSignal:
    """What SIGTERM does; until told otherwise it ends the process, since there is nothing to stop.

    To be made on the main thread; its methods may be called from any.
    """

    def __init__(self) -> None:
        """Take SIGTERM over."""
        self._action: Callable[[], object] = _exit_quietly
        # SIGINT is the terminal's, for the supervisor.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._action())

    def calls(self, action: Callable[[], object]) -> None:
        """From now on SIGTERM calls `action`, on the main thread: it must be safe there."""
        self._action = action

    def is_ignored(self) -> None:
        """From now on SIGTERM does nothing."""
        self._action = _do_nothing


def work_aside(work: Callable[[], NoReturn], nice: int) -> NoReturn:
    """Run `work`, which ends the process, on a thread `nice` steps below this one's priority.

    Threads that it starts are like it, and so are those that there are already. Where a system
    knows priorities of processes only (macOS), this thread gets the lower one too.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + nice, NICENESS_MAX)
    # Those of a preloaded library.
    for thread in _other_threads():
        _lower(thread, niceness)

    reader, writer = os.pipe()
    # A full pipe wakes as well as a written one.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    is_over = threading.Event()

    def run() -> None:
        _lower(0, niceness)
        try:
            work()
        finally:
            is_over.set()
            with contextlib.suppress(BlockingIOError):
                os.write(writer, b"\0")

    worker = threading.Thread(target=run, name="engine", daemon=True)
    worker.start()
    while not is_over.is_set():
        # To join the thread would be to wait for a lock, from which only a signal that comes to
        # this very thread wakes: one that the system gave to another would never be acted on.
        os.read(reader, 4096)
    worker.join()
    # Something went wrong, and the thread has said what.
    os._exit(1)


def _lower(thread: int, niceness: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _other_threads() -> list[int]:
    if sys.platform != "linux":
        return []
    return [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]


def _exit_quietly() -> None:
    os._exit(0)


def _do_nothing() -> None:
    pass
