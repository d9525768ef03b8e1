"""Ends this process when its parent is gone, whatever its other threads are doing.

Three nets, because each has a hole. A thread waits for the end of the lifeline pipe, but needs the
interpreter lock, which native code may hold. A signal on the pipe runs `_exit` itself as its
handler, without the lock, but never reaches a stopped process. The parent-death signal (Linux)
kills even that one, but is not known elsewhere.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading

# Status of a process that found itself alone; nobody is left to read it.
EXIT_ORPHANED = 75
_PR_SET_PDEATHSIG = 1


def die_with_parent(lifeline_fd: int) -> None:
    """Ask for SIGKILL on the parent's death (Linux), then check that it has not died already.

    The parent's *thread* counts, so it spawns from its main thread.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_ORPHANED)
    if _has_ended(lifeline_fd):
        os._exit(EXIT_ORPHANED)


def watch_lifeline(lifeline_fd: int) -> None:
    """Exit at once when the lifeline ends. Never returns the descriptor to anybody else."""
    _exit_by_signal(lifeline_fd)
    threading.Thread(target=_exit_at_end, args=(lifeline_fd,), name="lifeline", daemon=True).start()


def _exit_at_end(lifeline_fd: int) -> None:
    data = b"?"
    while data:
        try:
            data = os.read(lifeline_fd, 4096)
        except OSError:
            data = b""
    os._exit(EXIT_ORPHANED)


def _exit_by_signal(lifeline_fd: int) -> None:
    """Let the kernel send SIGIO when the pipe changes, with libc's `_exit` as the handler.

    A Python handler would wait for the interpreter lock; `_exit(signum)` needs nothing. The pipe
    carries no data, so its only change is its end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGIO, ctypes.cast(libc._exit, ctypes.c_void_p))
    with contextlib.suppress(OSError):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def _has_ended(lifeline_fd: int) -> bool:
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
