"""Whose temporary file is it: a process named so that a recycled pid is not taken for it."""

import os
import sys
from pathlib import Path

import psutil


def _start_mark(pid: int) -> int | None:
    """A number that two processes with the same pid do not share; None if there is no such pid."""
    if sys.platform == "linux":
        # Ticks since boot: unlike a time of day it does not move when the clock is set.
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return int(text.rpartition(")")[2].split()[19])
    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None


def own_mark() -> str:
    """`PID-START` of this process, as it stands in the names of its temporary files."""
    return f"{os.getpid()}-{_start_mark(os.getpid())}"


def is_alive(mark: str) -> bool:
    """Whether the process that made this mark still runs."""
    pid, _, start = mark.partition("-")
    return str(_start_mark(int(pid))) == start
