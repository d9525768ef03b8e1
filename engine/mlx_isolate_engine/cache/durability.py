"""How bytes reach a disk for good, and leave the page cache, on each system."""

import contextlib
import fcntl
import os
import sys

# <sys/fcntl.h> of macOS; Python knows them only there.
F_NOCACHE = 48
F_FULLFSYNC = 51


def sync(descriptor: int, platform: str = sys.platform) -> None:
    """Return once what was written is on the disk.

    Raises:
        OSError: the system could not.
    """
    if platform == "darwin":
        # fsync alone leaves the data in the drive's own cache there. Not every file system (a
        # network's, say) knows the call.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, F_FULLFSYNC)
            return
    os.fsync(descriptor)


def fetch_pages(descriptor: int, length: int, platform: str = sys.platform) -> None:
    """Have the first `length` bytes of a file read ahead, where the system can be asked to."""
    if sys.platform == "linux" and platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, length, os.POSIX_FADV_WILLNEED)


def forget_pages(descriptor: int, at: int, length: int, platform: str = sys.platform) -> None:
    """Drop file pages behind us: the model needs that memory more than a second read would.

    Linux keeps pages that are not on the disk yet, and begins to write them.

    Args:
        descriptor: of the open file.
        at: first byte.
        length: bytes; 0 = to the end. macOS knows only whole files, whose later pages stay out.
        platform: as sys.platform.
    """
    with contextlib.suppress(OSError):  # a wish, which some file systems refuse
        if sys.platform == "linux" and platform == "linux":
            os.posix_fadvise(descriptor, at, length, os.POSIX_FADV_DONTNEED)
        elif platform == "darwin":
            fcntl.fcntl(descriptor, F_NOCACHE, 1)
