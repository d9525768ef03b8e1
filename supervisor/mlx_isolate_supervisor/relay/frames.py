"""Where one direction of a WebSocket stands: between two frames or inside one (RFC 6455); pure."""

# Codes of close frames: the server goes, what was done against a rule (here: an operator's word),
# the server failed, the server comes back soon.
GOING_AWAY = 1001
REFUSED = 1008
FAILED = 1011
SERVICE_RESTART = 1012

_CLOSE = 0x8
# A frame's head is never longer: two bytes, an eight-byte length, a mask.
_HEAD_BYTES_MAX = 14
# What a close frame has room for besides its code.
_REASON_BYTES_MAX = 123


class FrameTracker:
    """Follows the lengths of frames as bytes pass, and looks at nothing else in them.

    Attributes:
        frames: how many have begun.
        is_closed: a close frame has begun; nothing may follow it.
    """

    __slots__ = ("_head", "_left", "frames", "is_closed")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self.frames = 0
        self.is_closed = False

    @property
    def is_at_boundary(self) -> bool:
        """Whether another frame may begin here."""
        return not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """So many bytes have passed."""
        position, size = 0, len(data)
        while position < size:
            if self._left:
                step = min(self._left, size - position)
                self._left -= step
                position += step
                continue
            head = self._head + data[position : position + _HEAD_BYTES_MAX]
            lengths = _read_head(head)
            if lengths is None:
                self._head = head
                return
            position += lengths[0] - len(self._head)
            self._head = b""
            self._left = lengths[1]
            self.frames += 1
            self.is_closed = self.is_closed or head[0] & 0x0F == _CLOSE


def _read_head(head: bytes) -> tuple[int, int] | None:
    """Lengths of a frame's head and payload; None while the head is not whole."""
    if len(head) < 2:
        return None
    short = head[1] & 0x7F
    size = 2 + {126: 2, 127: 8}.get(short, 0)
    whole = size + (4 if head[1] & 0x80 else 0)
    if len(head) < whole:
        return None
    return whole, int.from_bytes(head[2:size], "big") if size > 2 else short


def close_frame(code: int, reason: str) -> bytes:
    """A server's close frame; the reason is cut to what fits."""
    text = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore").encode()
    return bytes((0x80 | _CLOSE, 2 + len(text))) + code.to_bytes(2, "big") + text
