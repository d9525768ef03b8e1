"""Text for slow places, written by a thread of its own, so that nobody waits for it.

A pipe that nobody reads, a terminal held by Ctrl-S or a slow disk blocks whoever writes to it; that
must never be the loop on which every model is served. What does not fit is dropped.
"""

import contextlib
import io
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import TextIO

# Bytes kept for readers that do not read.
WAITING_BYTES_MAX = 256 * 1024
# For so long after a text the next one waits for company. Waking the thread costs more than
# writing, and whoever serves a request would pay for it; so it looks by itself while there is
# something every now and then, and is woken only out of a longer silence.
GATHER_S = 0.1

Write = Callable[[bytes], object]


class Outlet:
    """One queue and one thread for all places, which keeps what they are given in order.

    Args:
        bytes_max: what may wait for places that do not take it.
    """

    def __init__(self, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Write, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._is_asleep = False
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

    def put(self, write: Write, data: bytes) -> None:
        """Have `write(data)` called, or drop it if too much waits already; never blocks.

        Args:
            write: called in the outlet's thread with this text and what followed it there; an
                OSError that it raises is dropped with the text.
            data: at most `GATHER_S` old when it is written.
        """
        with self._changed:
            if self._waiting_bytes + len(data) > self._bytes_max:
                return
            self._waiting.append((write, data))
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
                self._thread.start()
            if self._is_asleep or self._waiting_bytes > self._bytes_max // 2:
                self._changed.notify_all()

    def finish(self, limit_s: float) -> None:
        """Wait until everything is written, or `limit_s` have passed."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait_text()
                batch = tuple(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                self._is_writing = True
            for write, texts in itertools.groupby(batch, itemgetter(0)):
                # The reader has gone, or the disk is full; the next text may be luckier.
                with contextlib.suppress(OSError):
                    write(b"".join(text for _, text in texts))

    def _wait_text(self) -> None:
        self._is_writing = False
        self._changed.notify_all()
        if not self._waiting:
            self._changed.wait(GATHER_S)
        self._is_asleep = True
        self._changed.wait_for(lambda: bool(self._waiting))
        self._is_asleep = False


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor, also one that does not block."""
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
        self._outlet.put(self._write_all, text)
        return len(text)

    def _write_all(self, data: bytes) -> None:
        write_all(self._fd, data)
