"""What of a file changes when its content does, without reading it."""

import os
from pathlib import Path

FileFacts = tuple[int, ...]


def file_facts(path: str | Path) -> FileFacts | None:
    """The facts of the file at `path`, None while there is none."""
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    # The time of the change itself too: who copies a file may restore its other time.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
