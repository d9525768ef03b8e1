"""The client's side of a connection as aiohttp runs it: its options, and JSON for broken HTTP."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_request import BaseRequest

from mlx_isolate_shared.errors import RequestError
from mlx_isolate_supervisor.relay.limits import CLIENT_UNSENT_BYTES_MAX, RelayLimits

# How long the rest of a refused body is read and dropped, so that its sender sees the answer.
_LINGER_S = 10.0


class ClientConnection(web.RequestHandler):
    """aiohttp's handler, except that bytes which are no HTTP get a JSON answer and no traceback."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CLIENT_UNSENT_BYTES_MAX
            )

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed, then close."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if isinstance(exc, LineTooLong):
            error = RequestError(
                "The request line or a header is too long.", status=431, code="headers_too_large"
            )
        elif status == 400:
            error = RequestError("The request is not valid HTTP/1.1.", code="bad_http")
        else:
            return super().handle_error(request, status, exc, message)
        response = web.Response(
            status=error.status, body=error.body(), content_type="application/json"
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

    `runner.cleanup()` ends the connections made here, as it does for aiohttp's own sites.
    """
    server = runner.server
    assert server is not None, "runner.setup() comes first"
    loop = asyncio.get_running_loop()
    options = _connection_options(limits)

    def connect() -> ClientConnection:
        return ClientConnection(server, loop=loop, **options)

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
