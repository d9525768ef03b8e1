"""Pipes between the supervisor and a child, on the event loop: lines in, messages out.

Owns the descriptors it is given. Nothing a child writes can grow memory or block the loop: each
turn reads a bounded amount, and a line has a longest length.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Literal

# Bytes read in one turn of the loop; without a bound a child that floods starves everything else.
# A line of output costs its reader 30 to 150 microseconds, and every byte may be a line.
READ_BYTES = 512
# Bytes read from a dead child's pipe; a helper process that holds its end could go on for ever.
FINAL_BYTES_MAX = 1 << 20
# Of these the last so many lines are handed on, all at once: as many as are kept of an engine.
FINAL_LINES_MAX = 2000

Overlong = Literal["drop", "cut"]


class LineSplitter:
    """Bytes to lines without their newline; pure.

    Args:
        line_bytes_max: longest line that is kept whole.
        overlong: `drop` a longer line to its end (counted in `dropped`), or `cut` it in pieces.
    """

    def __init__(self, line_bytes_max: int, overlong: Overlong) -> None:
        self._limit = line_bytes_max
        self._overlong = overlong
        self._rest = bytearray()
        self._is_dropping = False
        self.dropped = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that `data` completes; the unfinished rest is kept."""
        goes_on = b"\n" not in data and not self._is_dropping
        if goes_on and len(self._rest) + len(data) <= self._limit:
            self._rest += data
            return []
        *parts, rest = b"".join((self._rest, data)).split(b"\n")
        lines: list[bytes] = []
        for part in parts:
            if self._is_dropping:
                self._is_dropping = False
            else:
                lines += self._within_limit(part)
        if len(rest) > self._limit and self._overlong == "cut":
            # Pieces are of full length, however few bytes come at a time.
            *whole, rest = self._within_limit(rest)
            lines += whole
        elif len(rest) > self._limit and not self._is_dropping:
            self._is_dropping = True
            self.dropped += 1
        self._rest = bytearray() if self._is_dropping else bytearray(rest)
        return lines

    def finish(self) -> list[bytes]:
        """The last line, if it had no newline."""
        rest, self._rest = bytes(self._rest), bytearray()
        return self._within_limit(rest) if rest and not self._is_dropping else []

    def _within_limit(self, line: bytes) -> list[bytes]:
        if len(line) <= self._limit:
            return [line]
        if self._overlong == "drop":
            self.dropped += 1
            return []
        return [line[at : at + self._limit] for at in range(0, len(line), self._limit)]


class PipeReader:
    """Calls back with the lines of a pipe as they come, and once at its end.

    Args:
        fd: the read end; closed by `close`.
        on_lines: gets one or more lines.
        on_end: called when the last writer has closed its end; not after `close`.
    """

    def __init__(
        self,
        fd: int,
        splitter: LineSplitter,
        *,
        on_lines: Callable[[list[bytes]], None],
        on_end: Callable[[], None],
    ) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._splitter = splitter
        self._on_lines = on_lines
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)
        self._is_open = True
        self._is_closed = False

    def _read(self) -> None:
        if not self._take():
            self._end()
            self._on_end()

    def _take(self) -> bool:
        """Read once; False at the end."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return True
        lines = self._splitter.feed(data) if data else self._splitter.finish()
        if lines:
            self._on_lines(lines)
        return bool(data)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Deliver what the pipe still holds (its writer is dead), then close it."""
        if self._is_closed:
            return
        self._is_closed = True
        was_open = self._is_open
        self._end()
        if was_open:
            self._read_rest()
        os.close(self._fd)

    def _read_rest(self) -> None:
        rest = bytearray()
        with contextlib.suppress(BlockingIOError):
            while (left := FINAL_BYTES_MAX - len(rest)) and (data := os.read(self._fd, left)):
                rest += data
        lines = (self._splitter.feed(bytes(rest)) + self._splitter.finish())[-FINAL_LINES_MAX:]
        if lines:
            self._on_lines(lines)


class PipeWriter:
    """Writes to a pipe without ever blocking the loop; a reader that is gone is no error."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._rest = memoryview(b"")
        self._is_last = False
        self._is_closed = False

    def send(self, data: bytes, *, last: bool) -> None:
        """Queue `data`; with `last` the pipe is closed once it is written."""
        if self._is_closed:
            return
        self._rest = memoryview(bytes(self._rest) + data)
        self._is_last = last
        self._loop.add_writer(self._fd, self._write)
        self._write()

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._is_last = True
        self._loop.remove_writer(self._fd)
        if self._is_last:
            self.close()

    def close(self) -> None:
        """Close the pipe, written or not."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
