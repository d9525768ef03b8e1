"""The head of an engine's HTTP/1.1 answer: collected as bytes arrive, checked, and parsed; pure."""

import functools
import re

import msgspec

from mlx_isolate_supervisor.relay.framing import Body, ChunkedBody, FramingError, SizedBody
from mlx_isolate_supervisor.relay.limits import ANSWER_HEAD_BYTES_MAX

_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\x00-\x1f\x7f]*))?")
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")

# Headers that speak of one connection only (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

# Headers of an answer that the supervisor gives, besides those about origins.
OWN_HEADERS = frozenset({"server", "x-request-id"})


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """Status line and headers of an answer.

    Attributes:
        headers: end-to-end headers in their order; framing and hop-by-hop ones are left out.
        passed_on: what of the head the client gets as it is, encoded, from the status on: without
            the fields that are the supervisor's to say.
        has_date: whether a Date is among them.
        length: bytes of the body, None when it is chunked.
        has_length: whether the length is told to the client.
        keeps_alive: whether the engine will take another request on this connection.
    """

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    passed_on: bytes
    has_date: bool
    length: int | None
    has_length: bool
    is_event_stream: bool
    keeps_alive: bool


@functools.lru_cache(maxsize=32)
def parse_head(block: bytes, is_bodiless: bool = False) -> AnswerHead:
    """Parse a head without its blank line; an engine's streams all begin with the same one.

    Args:
        block: the head.
        is_bodiless: whether no body follows, so that none needs a length.

    Raises:
        FramingError: no HTTP/1.x, or a body whose end cannot be told from a death.
    """
    try:
        first, *lines = block.decode("utf-8").split("\r\n")
    except UnicodeDecodeError as error:
        raise FramingError("the head is not UTF-8") from error
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise FramingError("no HTTP/1.1 status line")
    fields: list[tuple[str, str]] = []
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None:
            raise FramingError("a malformed header line")
        fields.append((match[1], match[2].rstrip(" \t")))
    return _make_head(status_line, fields, is_bodiless)


def _make_head(
    status_line: re.Match[str], fields: list[tuple[str, str]], is_bodiless: bool
) -> AnswerHead:
    connection: set[str] = set()
    lengths: set[str] = set()
    codings: list[str] = []
    kept: list[tuple[str, str]] = []
    is_event_stream = False
    for name, value in fields:
        match name.lower():
            case "connection":
                connection.update(token.strip().lower() for token in value.split(","))
            case "content-length":
                lengths.add(value)
            case "transfer-encoding":
                codings.append(value.lower())
            case lowered if lowered in HOP_BY_HOP:
                pass
            case lowered:
                kept.append((name, value))
                if lowered == "content-type":
                    is_event_stream = value.lower().startswith("text/event-stream")
    status, reason = int(status_line[2]), status_line[3] or ""
    headers = tuple(field for field in kept if field[0].lower() not in connection)
    return AnswerHead(
        status=status,
        reason=reason,
        headers=headers,
        passed_on=_encode_passed_on(status, reason, headers),
        has_date=any(name.lower() == "date" for name, _ in headers),
        length=_body_length(lengths, codings, status, is_bodiless),
        has_length=bool(lengths) and status >= 200 and status not in (204, 304),
        is_event_stream=is_event_stream,
        keeps_alive=status_line[1] == "1" and "close" not in connection,
    )


def _encode_passed_on(status: int, reason: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"{status} {reason}"]
    for name, value in headers:
        lowered = name.lower()
        # Which pages may read an answer is the supervisor's to say, once.
        if lowered not in OWN_HEADERS and not lowered.startswith("access-control-"):
            lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n").encode()


def _body_length(
    lengths: set[str], codings: list[str], status: int, is_bodiless: bool
) -> int | None:
    if status < 200 or status in (204, 304) or (is_bodiless and not lengths and not codings):
        return 0
    if codings:
        if codings != ["chunked"] or lengths:
            raise FramingError("an answer framed in two ways or by an unknown coding")
        return None
    if len(lengths) != 1:
        raise FramingError("an answer with no length, or with several")
    (text,) = lengths
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise FramingError("a Content-Length that is no number")
    return int(text)


# The final head, the body that follows it (None after a 101), and bytes that came behind the head.
Beginning = tuple[AnswerHead, Body | None, bytes]


class HeadReader:
    """Collects the heads of a connection's answers, one after the other."""

    __slots__ = ("_buffer", "_is_bodiless", "_may_upgrade")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_bodiless = self._may_upgrade = False

    @property
    def has_begun(self) -> bool:
        """Whether a head has come in part."""
        return bool(self._buffer)

    def begin(self, *, is_bodiless: bool, may_upgrade: bool) -> None:
        """The next head is that of another answer.

        Args:
            is_bodiless: whether the answer has no body whatever its head says (HEAD).
            may_upgrade: whether the answer may be a 101.
        """
        self._buffer.clear()
        self._is_bodiless, self._may_upgrade = is_bodiless, may_upgrade

    def feed(self, data: bytes) -> Beginning | None:
        """Take what arrived; None until the head is whole. Informational ones are skipped.

        Raises:
            FramingError: this is no head, or one that cannot answer the request.
        """
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            if end > ANSWER_HEAD_BYTES_MAX:
                break
            head = parse_head(bytes(buffer[:end]), self._is_bodiless)
            del buffer[: end + 4]
            if head.status < 200 and head.status != 101:
                continue
            body = self._body_of(head)
            rest = bytes(buffer)
            buffer.clear()
            return head, body, rest
        if len(buffer) > ANSWER_HEAD_BYTES_MAX:
            raise FramingError("a head that is too large")
        return None

    def _body_of(self, head: AnswerHead) -> Body | None:
        if head.status == 101:
            if not self._may_upgrade:
                raise FramingError("an upgrade that nobody asked for")
            return None
        if head.length is None and not self._is_bodiless:
            return ChunkedBody(whole_events=head.is_event_stream)
        return SizedBody(0 if self._is_bodiless else head.length or 0)
