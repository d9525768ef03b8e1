"""An answer as the relay writes it: a head made anew, then the engine's bytes as they came."""

import functools
import time
from email.utils import formatdate

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest

from mlx_isolate_supervisor.relay.answer_head import AnswerHead
from mlx_isolate_supervisor.relay.edge import OWN_FIELDS

_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


class RelayedAnswer(web.StreamResponse):
    """An answer whose bytes the relay writes to the client's transport by itself.

    aiohttp reads requests and owns the connection. Its own way of writing an answer costs as much
    as all the rest of the relay, so to it this is a response that is written already: what is
    left for it is the end, and whether the connection is kept.

    Args:
        request: whose answer it is; its transport gets every byte.
        head: the engine's.
        whole: the body, where it is known from the beginning.

    Attributes:
        is_begun: whether its head is written.
    """

    def __init__(self, request: web.Request, head: AnswerHead, whole: bytes = b"") -> None:
        super().__init__(status=head.status, reason=head.reason)
        self._request = request
        self._engine_head = head
        self._whole = whole
        self._is_chunked = head.length is None and request.version >= HttpVersion11
        self._has_last_chunk = self._is_chunked and request.method != "HEAD"
        self._keeps_connection = (
            request.keep_alive
            and head.status != 101
            and (head.length is not None or self._is_chunked)
        )
        self._is_ended = False
        self.is_begun = False

    def begin(self, body: bytes = b"") -> None:
        """Write the head, and the (first of the) body with it; both leave at once if they can.

        Where the head is written already, the body follows it.

        Raises:
            ConnectionError: the client has gone.
        """
        if self.is_begun:
            self.add(body)
            return
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self.is_begun = True
        data = self._client_head() + self._whole + body
        # aiohttp knows by this that an answer was begun, and that no other may follow.
        self._request.writer.output_size += len(data)
        # uvloop gathers writes until the end of its turn, and the rest of the turn is the
        # accounting of this request; what passes the high-water mark is not gathered.
        low, high = transport.get_write_buffer_limits()
        transport.set_write_buffer_limits(high=0)
        transport.write(data)
        transport.set_write_buffer_limits(high, low)

    @property
    def is_chunked(self) -> bool:
        """Whether what is written has to be framed as chunks."""
        return self._is_chunked

    def add(self, data: bytes) -> None:
        """Write more of the body, framed as the answer is.

        Raises:
            ConnectionError: the client has gone.
        """
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        transport.write(data)

    def _client_head(self) -> bytes:
        request, head = self._request, self._engine_head
        old = request.version < HttpVersion11
        parts = [b"HTTP/1.0 " if old else b"HTTP/1.1 ", head.passed_on]
        if not head.has_date:
            parts.append(_date_field(int(time.time())))
        parts += [f"{name}: {value}\r\n".encode() for name, value in request[OWN_FIELDS]]
        if self._is_chunked:
            parts.append(_CHUNKED)
        elif head.length is not None and head.has_length:
            parts.append(b"Content-Length: %d\r\n" % head.length)
        if head.status == 101:
            parts.append(_UPGRADE)
        elif old and self._keeps_connection:
            parts.append(b"Connection: keep-alive\r\n")
        elif not old and not self._keeps_connection:
            parts.append(b"Connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    # What aiohttp asks of a response.

    @property
    def prepared(self) -> bool:
        """Whether the head is written."""
        return self.is_begun

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._keeps_connection

    def force_close(self) -> None:
        """Close the connection after the answer."""
        self._keeps_connection = False

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Nothing is left to prepare."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Write what ends the body, and wait until no more than usual is waiting."""
        transport = self._request.transport
        if self._is_ended or transport is None or transport.is_closing():
            return
        self._is_ended = True
        if self._has_last_chunk:
            transport.write(_LAST_CHUNK)
        if transport.get_write_buffer_size() > transport.get_write_buffer_limits()[1]:
            await self._request.writer.drain()


@functools.lru_cache(maxsize=2)
def _date_field(second: int) -> bytes:
    return f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
