"""Worker threads for blocking work with a deadline, after which the work is interrupted.

Chat templates are other people's programs. One that never ends must cost neither the event loop
nor a worker thread, and a thread can only be ended by an exception raised inside it.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# How many loop turns let a pending interrupt arrive while it can still be caught.
_SETTLE_TURNS = 100


class Interrupted(BaseException):
    """Raised inside a worker whose time is up; no handler of ordinary exceptions catches it."""


class _Job:
    """One call on a worker thread, and the only place that may interrupt it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_given_up = False

    def run(self) -> object:
        try:
            with self._lock:
                if self._is_given_up:
                    return None
                self._thread = threading.get_ident()
            try:
                return self._function()
            finally:
                with self._lock:
                    self._thread = None
                # An interrupt may have been sent just before; it is raised here at the latest.
                for _ in range(_SETTLE_TURNS):
                    pass
        except Interrupted:
            return None

    def interrupt(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self._thread is not None:
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Interrupted))


class Workers:
    """A few threads that run blocking calls for the event loop.

    Args:
        threads: how many; a long tokenization holds one, so that one alone would stop all.
        deadline_s: seconds after which a running call is interrupted.
    """

    def __init__(self, threads: int, deadline_s: float) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._deadline_s = deadline_s

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises.

        Raises:
            TimeoutError: it took longer than the deadline (waiting for a thread included).
        """
        job = _Job(function)
        future = asyncio.get_running_loop().run_in_executor(self._pool, job.run)
        try:
            done, _ = await asyncio.wait({future}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            job.interrupt()
            raise
        if not done:
            job.interrupt()
            raise TimeoutError
        result: T = future.result()  # type: ignore[assignment]
        return result

    def close(self) -> None:
        """Take no more work; running calls end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
