"""The log's file on disk, which makes room for itself: full, it becomes the first older one."""

import contextlib
import os
from pathlib import Path

from mlx_isolate_supervisor.telemetry.outlet import write_all

# One log file and the number of older ones: at most 60 MB on disk.
FILE_BYTES_MAX = 10_000_000
FILES_KEPT = 5


class LogFile:
    """An open log file. Used by one thread at a time; what it does may block.

    A file that was moved or removed, its folder too, is made anew with the next line.

    Args:
        path: the file; older ones are `path.1` (the youngest) to `path.N`.
        bytes_max: size from which another file is begun.
        kept: how many older ones stay.

    Attributes:
        path: as given.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, bytes_max: int = FILE_BYTES_MAX, kept: int = FILES_KEPT) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._kept = kept
        self._fd: int | None = None
        self._open()

    def write(self, data: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: they are lost, or a part of them.
        """
        fd = self._open()
        size = os.fstat(fd).st_size
        if size and size + len(data) > self._bytes_max:
            self.close()
            self._move_older()
            fd = self._open()
        write_all(fd, data)

    def close(self) -> None:
        """Close it until the next line comes."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is not None and not self._is_in_place(self._fd):
            self.close()
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            # With --log-text it holds what people wrote; for a collector the owner may open it up.
            self._fd = os.open(self.path, flags, 0o600)
        return self._fd

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(fd))
        except OSError:
            return False

    def _move_older(self) -> None:
        for number in range(self._kept, 0, -1):
            younger = self._older(number - 1) if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                younger.replace(self._older(number))

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
