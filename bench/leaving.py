"""The early end of a bench: SIGTERM and Ctrl-C unwind it, and nothing it started is left."""

import contextlib
import signal
import sys
from collections.abc import Generator
from types import FrameType

import psutil

# A daemon drains what it has and writes its cache; what takes longer is killed.
STOP_S = 30.0


@contextlib.contextmanager
def leaving_nothing() -> Generator[None]:
    """While it holds, SIGTERM raises SystemExit; however it ends, no process below this one stays.

    What is unwound ends most of them in its own way. Left to this are those whose start was cut
    short, before anybody was there to end them. In the main thread only.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except KeyboardInterrupt:
        # It is what somebody wants, and no fault to show the stack of.
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, _stay)
        _end(psutil.Process().children(recursive=True))


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, _stay)
    sys.exit(128 + number)


def _stay(_number: int, _frame: FrameType | None) -> None:
    """It is leaving already, and another signal must not cut that short."""


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, living = psutil.wait_procs(processes, STOP_S)
    for process in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
