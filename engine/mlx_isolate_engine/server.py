"""The engine's HTTP server on its unix socket: routes, limits, and the end of admission.

Knows the routes and turns every error into a response; a request's own course is in exchange.py.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable

import aiohttp
from aiohttp import web

from mlx_isolate_engine.answers import (
    JSON_HEADERS,
    ErrorBody,
    Handler,
    answer_errors,
    error_response,
    json_response,
    too_large,
)
from mlx_isolate_engine.cache_routes import CacheControl, CacheRoutes
from mlx_isolate_engine.completion.seam import CompletionService
from mlx_isolate_engine.exchange import Exchange
from mlx_isolate_engine.identity import Identity
from mlx_isolate_engine.protocols import anthropic, chat, completions
from mlx_isolate_engine.protocols.contract import Call, Parse
from mlx_isolate_engine.protocols.json_body import check_parts, filter_fields
from mlx_isolate_engine.protocols.openapi import openapi_document
from mlx_isolate_engine.protocols.response_input import list_page
from mlx_isolate_engine.protocols.response_store import KeptResponse, ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_shared.anthropic_error import anthropic_body
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    HttpError,
    RequestError,
)

log = logging.getLogger("engine.server")

# The supervisor decides how long a connection is kept for reuse; the engine outwaits it, so that
# no request meets a connection that is just being closed.
_KEEPALIVE_S = 3600.0
# Connections that may wait for accept; the supervisor hands out far fewer requests.
_BACKLOG = 512
# After a cut each client gets its error event; one that does not read is not waited for.
_CUT_S = 1.0
# Endpoints of OpenAI's API that a model which writes text cannot serve.
_UNSUPPORTED = {
    "/v1/embeddings": "make embeddings",
    "/v1/rerank": "rank documents",
    "/v1/moderations": "moderate",
    "/v1/images/generations": "make images",
    "/v1/images/edits": "edit images",
    "/v1/audio/speech": "speak",
    "/v1/audio/transcriptions": "listen",
    "/v1/audio/translations": "listen",
}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class EngineServer:
    """Serves one model until it is stopped.

    Args:
        service: where requests are prepared and run.
        identity: the names and facts that answers carry.
        settings: limits and intervals.
        on_completed: called after the first completion that ended by itself.
        cache: the prompt cache, for its endpoints; None = it is switched off.
    """

    def __init__(
        self,
        service: CompletionService,
        identity: Identity,
        settings: EngineSettings,
        *,
        on_completed: Callable[[], None],
        cache: CacheControl | None = None,
    ) -> None:
        self._cache_routes = CacheRoutes(cache)
        self._service = service
        self._identity = identity
        self._settings = settings
        self._on_completed: Callable[[], None] | None = on_completed
        self._responses = ResponseStore()
        self._active: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False
        self._runner: web.AppRunner | None = None

    @property
    def active(self) -> int:
        """Exchanges that have not ended."""
        return len(self._active)

    @property
    def connections(self) -> int:
        """Connections that are open, busy or not."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def start(self, socket_path: str) -> None:
        """Listen on a new unix socket of mode 0600.

        Raises:
            ConfigError: the path cannot be bound.
        """
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE_S,
            tcp_keepalive=False,
            max_line_size=self._settings.header_bytes_max,
            max_field_size=self._settings.header_bytes_max,
            shutdown_timeout=_CUT_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, _bind(socket_path), backlog=_BACKLOG).start()

    async def stop(self, finish_s: float) -> None:
        """Refuse new requests, let the active ones finish for so long, cut the rest."""
        self._is_stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(finish_s):
                await self._idle.wait()
        if self._active:
            log.warning("requests.cut count=%d", len(self._active))
        for exchange in tuple(self._active):
            exchange.cut(_stopping())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                await self._idle.wait()
        if self._runner is not None:
            await self._runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.body_bytes_max)
        app.middlewares.append(answer_errors)
        generation: dict[str, tuple[Parse, ErrorBody]] = {
            "/v1/chat/completions": (chat.parse, HttpError.body),
            "/chat/completions": (chat.parse, HttpError.body),
            "/v1/completions": (completions.parse, HttpError.body),
            "/completions": (completions.parse, HttpError.body),
            "/v1/messages": (anthropic.parse, anthropic_body),
            "/v1/responses": (ResponsesProtocol(self._responses).parse, HttpError.body),
        }
        for path, (parse, error_body) in generation.items():
            app.router.add_post(path, self._generation_handler(parse, error_body))
        for path in _UNSUPPORTED:
            app.router.add_post(path, _unsupported)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/responses/{id}", self._kept_response)
        app.router.add_get("/v1/responses/{id}/input_items", self._input_items)
        app.router.add_delete("/v1/responses/{id}", self._forget_response)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        self._cache_routes.add_to(app)
        return app

    def _generation_handler(self, parse: Parse, error_body: ErrorBody) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_id = _request_id(request)
            headers = {"x-request-id": request_id}
            try:
                return await self._generate(request, parse, request_id, headers)
            except HttpError as error:
                return error_response(error, error_body, headers)

        return handle

    async def _generate(
        self, request: web.Request, parse: Parse, request_id: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        if self._is_stopping:
            raise CapacityError(
                "The engine is stopping.", status=503, code="engine_stopping", retry_after_s=1.0
            )
        body = await self._read_body(request)
        wire = parse(body, self._call(request_id))
        exchange = Exchange(request, wire, headers, self._settings, self._note_completion)
        self._active.add(exchange)
        self._idle.clear()
        try:
            return await exchange.run(self._service)
        finally:
            self._active.discard(exchange)
            if not self._active:
                self._idle.set()

    def _note_completion(self) -> None:
        on_completed, self._on_completed = self._on_completed, None
        if on_completed is not None:
            on_completed()

    def _call(self, request_id: str) -> Call:
        return Call(
            identity=self._identity,
            request_id=request_id,
            unique=uuid.uuid4().hex,
            created=int(time.time()),
        )

    async def _read_body(self, request: web.Request) -> bytes:
        limit = self._settings.body_bytes_max
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large(limit) from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise RequestError("The request body could not be read.") from error
        check_parts(body)
        return filter_fields(body, self._settings.strip_params, self._settings.set_params)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await self._read_body(request)
            completion = anthropic.parse_count(body, self._call(_request_id(request)))
            tokens = await self._service.count_tokens(completion)
        except HttpError as error:
            return error_response(error, anthropic_body, {})
        return web.Response(body=anthropic.count_body(tokens), headers=JSON_HEADERS)

    async def _kept_response(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false") != "false":
            raise RequestError("A kept response comes whole, not streamed.", param="stream")
        return web.Response(body=self._kept(request).body, headers=JSON_HEADERS)

    async def _input_items(self, request: web.Request) -> web.Response:
        body = list_page(self._kept(request).items, request.query)
        return web.Response(body=body, headers=JSON_HEADERS)

    def _kept(self, request: web.Request) -> KeptResponse:
        kept = self._responses.get(request.match_info["id"])
        if kept is None:
            raise _no_response()
        return kept

    async def _forget_response(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        if not self._responses.remove(response_id):
            raise _no_response()
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(openapi_document())

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != self._identity.model:
            raise RequestError(
                f"This engine serves the model '{self._identity.model}' only.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return json_response(self._model_object())

    def _model_object(self) -> dict[str, object]:
        facts = self._identity.facts
        return {
            "id": self._identity.model,
            "object": "model",
            "created": self._identity.created,
            "owned_by": "mlx-isolate",
            "context_length": facts.context_length,
            "max_model_len": facts.context_length,
            "architecture": facts.architecture,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "stopping" if self._is_stopping else "ok"})


async def _unsupported(request: web.Request) -> web.StreamResponse:
    raise RequestError(
        f"This model cannot {_UNSUPPORTED[request.path]}; it writes text.",
        code="unsupported_endpoint",
        param="model",
    )


def _no_response() -> RequestError:
    return RequestError(
        "There is no such response (any more).", status=404, code="response_not_found"
    )


def _stopping() -> EngineError:
    return EngineError(
        "The engine was stopped before the answer was complete.",
        status=503,
        code="engine_stopping",
    )


def _request_id(request: web.Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _bind(socket_path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_path)
        # Nobody can connect before the server listens, so there is no moment of a wider mode.
        os.chmod(socket_path, 0o600)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {socket_path}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener
