"""What a person is told while nothing can be written to the cache directory; no I/O."""

import contextlib
import errno
from collections.abc import Generator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Trouble:
    """Remembers whether the last attempt to write failed, and why.

    Attributes:
        told: see trouble_of; empty where the last attempt succeeded.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.told = ""

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """One attempt: an OSError in it is kept and goes on."""
        try:
            yield
        except OSError as error:
            self.told = trouble_of(error, self._root)
            raise
        self.told = ""


def trouble_of(error: OSError, root: Path) -> str:
    """One sentence without a full stop: what is wrong, what that costs, what to do about it."""
    if error.errno in _FULL:
        remedy = "free some room on its disk"
    else:
        remedy = "make it a folder that this user can write to"
    cause = error.strerror or str(error)
    place = root if error.filename is None else Path(error.filename)
    if place.suffix == ".tmp":
        place = place.parent
    if place != root:
        cause += f": {place}"  # a folder in it may be what is wrong
    return (
        f"{root} cannot be written ({cause}), so prompts are kept in memory "
        f"only: {remedy}, or choose another --ssd-cache-dir; writes are tried again by themselves"
    )
