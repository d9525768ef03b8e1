"""The client's side of a connection as aiohttp runs it: its options, and JSON for broken HTTP."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_request import BaseRequest

from mlx_isolate_shared.errors import HttpError, RequestError
from mlx_isolate_supervisor.relay.edge import EDGE, SERVER, own_fault
from mlx_isolate_supervisor.relay.limits import (
    CLIENT_STALL_LOOK_S,
    CLIENT_UNSENT_BYTES_MAX,
    RelayLimits,
)
from mlx_isolate_supervisor.relay.socket_state import unread_bytes

# How long the rest of a refused body is read and dropped, so that its sender sees the answer.
_LINGER_S = 10.0


class ClientConnection(web.RequestHandler):
    """aiohttp's handler, except that bytes which are no HTTP get a JSON answer and no traceback.

    A client that takes nothing of what was written for it is hung up on. While an answer is
    under way the relay sees to that, and says so; this is for the end of an answer, for answers
    of the supervisor's own, and for connections that are closed already but for what was not
    taken. Without it each such client would keep a descriptor, and what it did not take, for ever.

    Args:
        rest_s: longest time in which a client may take nothing.
    """

    __slots__ = ("_has_taken", "_held_transport", "_rest_s", "_rest_timer")

    def __init__(self, manager: web.Server, *, rest_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._rest_s = rest_s
        self._rest_timer: asyncio.TimerHandle | None = None
        self._held_transport: asyncio.Transport | None = None
        self._has_taken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CLIENT_UNSENT_BYTES_MAX
            )
        # aiohttp forgets a transport that it has closed.
        self._held_transport = cast(asyncio.Transport, transport)
        self._look_again(0)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the event loop."""
        self._held_transport = None
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Called by the event loop: the client has taken enough for more to be written."""
        self._has_taken = True
        super().resume_writing()

    def _look_again(self, unread: int) -> None:
        loop = asyncio.get_running_loop()
        self._rest_timer = loop.call_later(self._rest_s, self._look_at_rest, unread)

    def _look_at_rest(self, before: int) -> None:
        transport, unread = self._held_transport, 0
        if transport is None:
            return
        # While more may be written, what waits says nothing about what was taken.
        is_still = self._current_request is None or self.writing_paused
        if is_still and transport.get_write_buffer_size():
            unread = unread_bytes(transport)
        if before and unread >= before and not self._has_taken:
            transport.abort()
            return
        self._has_taken = False
        self._look_again(unread)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed, or failed where nobody else could answer; then close."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        error: HttpError
        if isinstance(exc, LineTooLong):
            error = RequestError(
                "The request line or a header is too long.", status=431, code="headers_too_large"
            )
        elif isinstance(exc, BadHttpMessage) and exc.message.startswith("Too many headers"):
            error = RequestError(
                "The request has too many headers.", status=431, code="headers_too_large"
            )
        elif status == 400:
            error = RequestError("The request is not valid HTTP/1.1.", code="bad_http")
        else:
            self.log_exception("request.fault status=%d", status, exc_info=exc)
            error = own_fault()
        response = web.Response(
            status=error.status,
            body=error.body(),
            content_type="application/json",
            headers=dict([SERVER]),
        )
        response.force_close()
        return response


def runner_options(limits: RelayLimits) -> dict[str, Any]:
    """Keyword arguments for `web.AppRunner`; the relay relies on each of them.

    `handler_cancellation` is how a client that has gone ends its request at any await;
    `auto_decompress` off keeps a small compressed body from becoming a huge one.
    """
    return {"handler_cancellation": True, **_connection_options(limits)}


def client_factory(runner: web.AppRunner, limits: RelayLimits) -> Callable[[], ClientConnection]:
    """The protocol factory for `loop.create_server`, once `runner.setup()` has run.

    `Edge.install` has seen the application. `runner.cleanup()` ends the connections made here, as
    it does for aiohttp's own sites.
    """
    server = runner.server
    assert server is not None, "runner.setup() comes first"
    server.request_handler = runner.app[EDGE].around(server.request_handler)
    loop = asyncio.get_running_loop()
    options = _connection_options(limits)
    # The relay waits once to say that its client has stalled, and once more for that to be read.
    rest_s = 2 * limits.client_stall_s + CLIENT_STALL_LOOK_S

    def connect() -> ClientConnection:
        return ClientConnection(server, loop=loop, rest_s=rest_s, **options)

    return connect


def _connection_options(limits: RelayLimits) -> dict[str, Any]:
    return {
        "access_log": None,
        "keepalive_timeout": limits.keep_alive_s,
        "auto_decompress": False,
        "max_line_size": limits.header_bytes_max,
        "max_field_size": limits.header_bytes_max,
        "lingering_time": _LINGER_S,
    }
