"""Lets tests that hold figures to a bound run while no other worker's test does."""

import fcntl
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def held(path: Path, how: int) -> Generator[None]:
    """An advisory lock on a file for as long as the block runs."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def turn(folder: Path, alone: bool) -> Generator[None]:
    """A place in the room: beside others, or `alone` once those inside have left.

    Who enters passes the door; one who wants the room alone stays in the door until it has it, so
    that nobody slips in before and it cannot starve.
    """
    room = folder / "room.lock"
    with ExitStack() as inside:
        with held(folder / "door.lock", fcntl.LOCK_EX):
            inside.enter_context(held(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
