"""Processes of the daemon under drill: looked up, verified as its children, and only then signalled."""

import contextlib
import signal
import sys
from typing import Any

import psutil

from mlx_isolate_supervisor.drills.record import CannotRun


def child_of(supervisor_pid: int, pid: int | None) -> psutil.Process:
    """The process `pid`, which is a child of the supervisor; signals to it are safe from pid reuse.

    Raises:
        CannotRun: it is none, e.g. since the daemon runs on another machine or in a container.
    """
    try:
        if pid is None:
            raise CannotRun("the model has no engine process")
        process = psutil.Process(pid)
        if process.ppid() != supervisor_pid:
            raise CannotRun(
                f"process {pid} is no child of the supervisor {supervisor_pid} on this machine"
            )
    except psutil.Error as error:
        raise CannotRun(f"there is no process {pid} on this machine that we may see") from error
    return process


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Signal a verified process.

    Raises:
        CannotRun: it has ended meanwhile, or belongs to somebody else.
    """
    try:
        process.send_signal(number)
    except psutil.Error as error:
        raise CannotRun(f"process {process.pid} cannot be sent {number.name}") from error


def wake(process: psutil.Process) -> None:
    """SIGCONT, whatever has become of it."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGCONT)


def end(process: psutil.Process) -> None:
    """SIGKILL, whatever has become of it."""
    with contextlib.suppress(psutil.Error):
        process.kill()


def children(pid: int) -> list[psutil.Process]:
    """Every descendant of `pid` now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs (a zombie does not)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Limit:
    """A resource limit of a verified process; `lift` restores the earlier one (Linux).

    Args:
        process: the engine.
        name: of the constant in the resource module, e.g. `RLIMIT_FSIZE`.
        amount: the soft limit.

    Raises:
        CannotRun: this system cannot limit another process.
    """

    def __init__(self, process: psutil.Process, name: str, amount: int) -> None:
        if sys.platform != "linux":
            raise CannotRun("only Linux can limit what another process may use")
        self._process: Any = process
        self._which: int = getattr(psutil, name)
        try:
            self._before: tuple[int, int] = self._process.rlimit(self._which)
            self._process.rlimit(self._which, (amount, self._before[1]))
        except psutil.Error as error:
            raise CannotRun(f"process {process.pid} cannot be limited") from error

    def lift(self) -> None:
        """Restore it, if the process still lives."""
        with contextlib.suppress(psutil.Error):
            self._process.rlimit(self._which, self._before)
