"""The body of an engine's HTTP/1.1 answer as bytes arrive: its chunks, its events; pure.

A body is fed piece by piece and hands back what may go on to the client. Of a chunked answer
that is whole chunks only, still framed as they came, so that they can be written to a client's
socket untouched; of an event stream it is whole events only, so that an error event can be set
behind them at any moment.
"""

from typing import Protocol

from mlx_isolate_supervisor.relay.limits import ANSWER_HELD_BYTES_MAX, ANSWER_TRAILER_BYTES_MAX

# A chunk-size line has at most 16 hexadecimal digits here, so its end is within this many bytes.
_SIZE_LINE_BYTES_MAX = 18
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_FRAMED_EVENT_ENDS = tuple(end + b"\r\n" for end in _EVENT_ENDS)
_EVENT_END_BYTES_MAX = 4

# How an event that comes as one piece ends, and how it then begins, by the length of the piece:
# a chunk of n bytes is framed by its size line and two line ends. Comparing both ends is several
# times cheaper than parsing, and says the same.
ONE_EVENT_END = b"\n\n\r\n"
ONE_EVENT_BYTES_MAX = 4096


def _one_event_starts() -> tuple[bytes, ...]:
    """Index: length of a piece; value: the size line of the one chunk that fills it."""
    # A length that no chunk fills (just above a power of 16) has a start that nothing has.
    starts = [b"none\r\n"] * ONE_EVENT_BYTES_MAX
    for length in range(1, ONE_EVENT_BYTES_MAX):
        line = b"%x\r\n" % length
        if (size := len(line) + length + 2) < ONE_EVENT_BYTES_MAX:
            starts[size] = line
    return tuple(starts)


ONE_EVENT_STARTS: tuple[bytes, ...] = _one_event_starts()
# The two ends of a piece as slices: to cut and compare takes half the time of `startswith`, which
# parses its arguments by a format.
ONE_EVENT_HEADS = tuple(slice(len(start)) for start in ONE_EVENT_STARTS)
ONE_EVENT_TAIL = slice(-len(ONE_EVENT_END), None)


class FramingError(Exception):
    """The engine's bytes are no HTTP/1.1 answer that can be passed on."""


class Body(Protocol):
    """A body that is fed as bytes arrive.

    Attributes:
        has_ended: the body is whole; what is fed now is surplus.
        surplus: bytes that came after its end; a connection with any is not reused.
        chunks: chunks seen so far.
        is_at_boundary: a stream of events with nothing held back, so that a piece which is one
            whole event may pass without being fed (`ONE_EVENT_STARTS`).
    """

    is_at_boundary: bool
    has_ended: bool
    surplus: bytes
    chunks: int

    def feed(self, data: bytes) -> bytes:
        """Take what arrived, return what may be written to the client (often the same object).

        Raises:
            FramingError: the bytes are not what the head promised.
        """
        ...


class SizedBody:
    """A body of known length, passed on as it arrives."""

    __slots__ = ("_left", "chunks", "has_ended", "is_at_boundary", "surplus")

    def __init__(self, length: int) -> None:
        self._left = length
        self.has_ended = length == 0
        self.surplus = b""
        self.chunks = 0
        self.is_at_boundary = False

    def feed(self, data: bytes) -> bytes:
        """See `Body.feed`."""
        self._left -= len(data)
        if self._left > 0:
            return data
        self.has_ended = True
        if self._left == 0:
            return data
        self.surplus = data[self._left :]
        return data[: self._left]


class ChunkedBody:
    """A chunked body, handed out as whole chunks in the engine's own framing.

    The terminating chunk is not handed out: whoever ends the client's answer writes that.

    Args:
        whole_events: hand out no further than the end of an SSE event.
    """

    __slots__ = (
        "_event_tail",
        "_held",
        "_held_bytes",
        "_needed",
        "_scanned",
        "_whole_events",
        "chunks",
        "has_ended",
        "is_at_boundary",
        "surplus",
    )

    def __init__(self, *, whole_events: bool) -> None:
        self._whole_events = whole_events
        # Pieces since the last boundary; the first `_scanned` bytes of them are whole chunks,
        # and below `_needed` bytes there is nothing new to find.
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._scanned = 0
        self._needed = 0
        # Last payload bytes since the last boundary, for an event's end that chunks cut in two.
        self._event_tail = b""
        self.has_ended = False
        self.surplus = b""
        self.chunks = 0
        self.is_at_boundary = whole_events

    def feed(self, data: bytes) -> bytes:
        """See `Body.feed`. One whole event in one piece, the usual case, is not copied."""
        if self.has_ended:
            self.surplus = data
            return b""
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed:
                return b""
            data = b"".join(self._held)
            self._held.clear()
        position = self._scanned
        size = len(data)
        boundary = 0
        while position < size:
            line_end = data.find(b"\r\n", position, position + _SIZE_LINE_BYTES_MAX)
            if line_end < 0:
                if size - position >= _SIZE_LINE_BYTES_MAX:
                    raise FramingError("a chunk-size line without an end")
                return self._hold(data, boundary, position, size + 1)
            length = chunk_length(data[position:line_end])
            if length == 0:
                return self._end(data, boundary, position, line_end)
            end = line_end + length + 4
            if end > size:
                return self._hold(data, boundary, position, end)
            if data[end - 2 : end] != b"\r\n":
                raise FramingError("a chunk that is longer than its size line says")
            position = end
            self.chunks += 1
            if not self._whole_events or data.endswith(_FRAMED_EVENT_ENDS, line_end + 2, end):
                boundary = end
                self._event_tail = b""
            elif self._ends_event(
                data[max(line_end + 2, end - 2 - _EVENT_END_BYTES_MAX) : end - 2]
            ):
                boundary = end
        if boundary == size:
            self._scanned = 0
            self.is_at_boundary = self._whole_events
            return data
        return self._hold(data, boundary, position, size + 1)

    def _ends_event(self, payload_end: bytes) -> bool:
        self._event_tail = (self._event_tail + payload_end)[-_EVENT_END_BYTES_MAX:]
        if not self._event_tail.endswith(_EVENT_ENDS):
            return False
        self._event_tail = b""
        return True

    def _hold(self, data: bytes, boundary: int, position: int, needed: int) -> bytes:
        if needed - boundary > ANSWER_HELD_BYTES_MAX:
            raise FramingError("a chunk or an event that is too large")
        rest = data[boundary:]
        if rest:
            self._held.append(rest)
        self._held_bytes = len(rest)
        self.is_at_boundary = self._whole_events and not rest
        self._scanned = position - boundary
        self._needed = needed - boundary
        return data[:boundary]

    def _end(self, data: bytes, boundary: int, position: int, line_end: int) -> bytes:
        if data.startswith(b"\r\n\r\n", line_end):
            end = line_end
        else:
            end = data.find(b"\r\n\r\n", line_end)
        if end < 0:
            if len(data) - line_end > ANSWER_TRAILER_BYTES_MAX:
                raise FramingError("trailers without an end")
            return self._hold(data, boundary, position, len(data) + 1)
        self.has_ended = True
        self.is_at_boundary = False
        self.surplus = data[end + 4 :]
        return data[:position]


def chunk_length(line: bytes) -> int:
    """The size that a chunk-size line gives: hexadecimal digits and nothing else.

    Raises:
        FramingError: a sign, a prefix, an extension, or no number at all.
    """
    # int() alone would take signs, underscores, blanks and 0x.
    if not line.isalnum() or line[:2] in (b"0x", b"0X"):
        raise FramingError("a chunk size that is no number")
    try:
        return int(line, 16)
    except ValueError as error:
        raise FramingError("a chunk size that is no number") from error


def unframe(chunks: bytes) -> bytes:
    """The payload of whole chunks, for a client that knows no chunked coding (HTTP/1.0)."""
    parts: list[bytes] = []
    position = 0
    while position < len(chunks):
        line_end = chunks.index(b"\r\n", position)
        end = line_end + 2 + chunk_length(chunks[position:line_end])
        parts.append(chunks[line_end + 2 : end])
        position = end + 2
    return b"".join(parts)


def frame(payload: bytes) -> bytes:
    """`payload` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
