"""Text for standard output and error, written by a thread of its own, so that nobody waits for it.

A pipe that nobody reads, or a terminal held by Ctrl-S, blocks whoever writes to it; that must never
be the loop on which every model is served. What does not fit is dropped: the log has it all.
"""

import contextlib
import io
import os
import select
import threading
from collections import deque
from typing import TextIO

# Bytes kept for readers that do not read.
WAITING_BYTES_MAX = 256 * 1024


class Outlet:
    """One queue and one thread for all descriptors, which keeps what they are given in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def stream(self, like: TextIO) -> TextIO:
        """A stream to the descriptor of `like`, which must not be written to any more.

        One without a descriptor (a test's) is given back as it is.
        """
        try:
            raw = _Raw(self, like.fileno())
        except (OSError, ValueError):
            return like
        encoding = getattr(like, "encoding", None) or "utf-8"
        return io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors="backslashreplace", write_through=True
        )

    def put(self, fd: int, data: bytes) -> None:
        """Have `data` written to `fd`, or drop it if too much waits already; never blocks."""
        with self._changed:
            if self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
                return
            self._waiting.append((fd, data))
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, limit_s: float) -> None:
        """Wait until everything is written, or `limit_s` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                fd, data = self._waiting.popleft()
                self._waiting_bytes -= len(data)
                self._is_writing = True
            # The reader has gone, or the disk is full; the next text may be luckier.
            with contextlib.suppress(OSError):
                _write_all(fd, data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


class _Raw(io.RawIOBase):
    def __init__(self, outlet: Outlet, fd: int) -> None:
        super().__init__()
        self._outlet = outlet
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object, /) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        self._outlet.put(self._fd, text)
        return len(text)
