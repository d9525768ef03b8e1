"""What every endpoint has in common: request id, Host and origin checks, CORS, JSON errors."""

import itertools
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from mlx_isolate_shared.errors import EngineError, HttpError, RequestError
from mlx_isolate_supervisor.relay.error_wire import error_body
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.target import WORK_PATHS, asks_for_work, path_on_engine

REQUEST_ID = web.RequestKey("request_id", str)
# Where a request goes on its engine, which decides the form of its errors.
ENGINE_PATH = web.RequestKey("engine_path", str)
# What every answer to a request has among its headers, whoever writes it.
OWN_FIELDS = web.RequestKey("own_fields", tuple[tuple[str, str], ...])

SERVER = ("Server", "mlx-isolate")
# What a client may call its request; anything else is replaced, so that logs stay readable.
_REQUEST_ID_FORM = re.compile(r"[!-~]{1,128}")
# A made id is this process's own random part and a number.
_PROCESS = secrets.token_hex(6)
_numbers = itertools.count(1)
_CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})

# An application as the connections of its server see it.
RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


def error_response(error: HttpError, path: str) -> web.Response:
    """An error as the JSON answer of the endpoint at `path`."""
    return web.Response(
        status=error.status,
        body=error_body(error, path),
        content_type="application/json",
        headers=error.headers(),
    )


def own_fault() -> EngineError:
    """What a client is told of a fault of ours: nothing of its inside."""
    return EngineError(
        "The server failed on this request.",
        status=500,
        code="internal_error",
        retry_after_s=None,
    )


class Edge:
    """Middleware and response hook of the whole application.

    Args:
        origins: who may call from a browser.
        hosts: which Host names are right.
        header_bytes_max: names and values of one request's headers.
    """

    def __init__(self, origins: OriginPolicy, hosts: HostPolicy, header_bytes_max: int) -> None:
        self._origins = origins
        self._hosts = hosts
        self._header_bytes_max = header_bytes_max

    def install(self, app: web.Application) -> None:
        """Make it the outermost middleware of `app`; call before adding others."""
        app[EDGE] = self
        app.middlewares.append(self.middleware)
        app.on_response_prepare.append(self._on_response_prepare)

    def around(self, answer: RequestHandler) -> RequestHandler:
        """`answer`, the whole application, with what no middleware sees in our form as well.

        aiohttp looks for a route and at `Expect` before the first middleware (and its own look
        fails on bytes that are no text); what fails there is checked and answered as if a handler
        had raised it.
        """

        async def answer_in_form(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await answer(request)
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 (the middleware logs it)
                return await self.middleware(cast(web.Request, request), _raising(error))

        return answer_in_form

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the request, then turn whatever the handler raises into one JSON answer."""
        request_id = choose_request_id(request.headers.get("x-request-id"))
        request[REQUEST_ID] = request_id
        request[OWN_FIELDS] = (
            SERVER,
            ("x-request-id", request_id),
            *self._origins.answer_headers(request.headers.get("Origin")),
        )
        try:
            _check_expectation(request)
            self._check(request)
            if request.method == "OPTIONS":
                return self._options(request)
            return await handler(request)
        except HttpError as error:
            return _refusal(request, error)
        except web.HTTPException as error:
            return _from_aiohttp(request, error)
        except ConnectionError:
            raise  # the client has gone; aiohttp ends the connection
        except Exception:
            # The top frame of a request: a fault of ours must not show its inside to a client.
            if request.writer.output_size:
                raise
            _log.exception("request.fault id=%s path=%s", request[REQUEST_ID], request.path)
            return _refusal(request, own_fault())

    def _check(self, request: web.Request) -> None:
        fields = request.raw_headers
        size = sum(map(len, itertools.chain.from_iterable(fields))) + 4 * len(fields)
        if size > self._header_bytes_max:
            raise RequestError(
                f"The request's headers have {size} bytes; the limit is {self._header_bytes_max}.",
                status=431,
                code="headers_too_large",
            )
        headers = request.headers
        hosts = headers.getall("Host", [])
        if len(hosts) > 1:
            raise RequestError("The request has more than one Host header.", code="bad_host")
        host = hosts[0] if hosts else None
        if not self._hosts.allows(host):
            raise RequestError(
                f"This server does not answer for the host {host!r}; "
                "name it with --allowed-hosts if it should.",
                status=403,
                code="host_not_allowed",
            )
        # A WebSocket is opened by a GET that no browser asks about first, and whose answers any
        # page may read. Controls are for our own page and for programs: to leave them to a
        # browser's preflight would win nobody anything.
        is_upgrade = "Upgrade" in headers
        is_work = not is_upgrade and asks_for_work(request.path)
        if (is_upgrade or request.method in _CHANGING_METHODS) and self._origins.is_forged(
            headers.get("Origin"), host, headers.get("Content-Type", "") if is_work else ""
        ):
            raise RequestError(
                "This browser origin may not call this server; see --allowed-origins.",
                status=403,
                code="origin_not_allowed",
            )

    def _options(self, request: web.Request) -> web.Response:
        origin = request.headers.get("Origin")
        if origin is not None and "Access-Control-Request-Method" in request.headers:
            if not self._origins.allows(origin):
                raise RequestError(
                    "This browser origin may not call this server; see --allowed-origins.",
                    status=403,
                    code="origin_not_allowed",
                )
            headers = self._origins.preflight_headers(
                request.headers.get("Access-Control-Request-Headers"),
                request.headers.get("Access-Control-Request-Private-Network") == "true",
            )
            return web.Response(status=204, headers=dict(headers))
        missing = request.match_info.http_exception
        if isinstance(missing, web.HTTPMethodNotAllowed):
            allow = ", ".join(sorted({*missing.allowed_methods, "OPTIONS"}))
            return web.Response(status=204, headers={"Allow": allow})
        if missing is not None:
            raise missing
        return web.Response(status=204, headers={"Allow": "OPTIONS"})

    async def _on_response_prepare(
        self, request: web.Request, response: web.StreamResponse
    ) -> None:
        for name, value in request.get(OWN_FIELDS, (SERVER,)):
            response.headers[name] = value


def choose_request_id(asked: str | None) -> str:
    """The client's own id where it is printable and short, else a new one."""
    if asked is not None and _REQUEST_ID_FORM.fullmatch(asked):
        return asked
    return f"req-{_PROCESS}-{next(_numbers):x}"


async def continue_later(_: web.Request) -> None:
    """Expect handler of routes that read a body: says nothing yet.

    The `100 Continue` is sent by the reader of the body, after every check that needs no body, so
    that a refusal is the first and only status.
    """


def _check_expectation(request: web.BaseRequest) -> None:
    expectation = request.headers.get("Expect", "").strip()
    if expectation and expectation.lower() != "100-continue":
        raise RequestError(
            "The only expectation this server meets is 100-continue.",
            status=417,
            code="expectation_failed",
        )


def _raising(error: Exception) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        raise error

    return handler


def _refusal(request: web.Request, error: HttpError) -> web.Response:
    path = request.get(ENGINE_PATH) or path_on_engine(request.path)
    response = error_response(error, path)
    if not request.content.is_eof():
        # What is left of the body must not be read as the next request.
        response.force_close()
    return response


def _instead(path: str) -> str:
    """What clients that are set up for something else are to change; empty for all others."""
    if path.startswith("/v1/v1/"):
        return "; leave /v1 off the client's base URL"
    if path.startswith("/api/"):
        return "; Ollama's API is not spoken here, OpenAI's is, under /v1"
    if f"/v1{path}" in WORK_PATHS:
        return f"; it is at /v1{path}: the client's base URL lacks /v1"
    return ""


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        return error
    if error.status == 405:
        allowed = " or ".join(error.headers.get("Allow", "").split(","))
        message = f"{request.method} is not allowed at {request.path}; use {allowed}."
        code = "method_not_allowed"
    elif error.status == 404:
        message = f"There is no endpoint {request.path}{_instead(request.path)}."
        code = "not_found"
    else:
        message, code = f"{error.reason}.", error.reason.lower().replace(" ", "_")
    response = _refusal(request, RequestError(message, status=error.status, code=code))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


EDGE = web.AppKey("edge", Edge)
