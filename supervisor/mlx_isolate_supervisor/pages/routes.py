"""The endpoints that the supervisor answers by itself, from memory, never waiting for an engine.

The only ones that wait are the controls, which a caller asks to wait.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from mlx_isolate_shared.errors import RequestError
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.pages import models_page
from mlx_isolate_supervisor.pages.asked import asked_model, whole_number
from mlx_isolate_supervisor.pages.json_answer import json_answer
from mlx_isolate_supervisor.pages.log_followers import LogFollowers
from mlx_isolate_supervisor.pages.openapi_page import OpenApiPage
from mlx_isolate_supervisor.telemetry.logs import BOOK_LINES_MAX, LogBook
from mlx_isolate_supervisor.telemetry.status import ModelStatus, Status


class DaemonView(Protocol):
    """What the endpoints need of the daemon."""

    @property
    def pool(self) -> Pool:
        """The models."""
        ...

    @property
    def book(self) -> LogBook:
        """What was logged."""
        ...

    @property
    def version(self) -> str:
        """The installed version."""
        ...

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether a shutdown has begun."""
        ...

    @property
    def unlisted(self) -> set[str]:
        """Ids that /v1/models leaves out."""
        ...

    @property
    def load_timeout_s(self) -> float:
        """How long a load that somebody waits for may take."""
        ...

    def status(self) -> Status:
        """Everything, from memory."""
        ...


class Routes:
    """Handlers of the supervisor's own endpoints.

    Args:
        daemon: where every answer comes from.
    """

    def __init__(self, daemon: DaemonView) -> None:
        self._daemon = daemon
        self._followers = LogFollowers(daemon.book)

    def add_to(self, app: web.Application) -> None:
        """Mount every endpoint."""
        get, post = app.router.add_get, app.router.add_post
        get("/", self.root)
        get("/health", self.health)
        get("/livez", self.live)
        get("/readyz", self.ready)
        get("/status", self.status)
        for prefix in ("/v1/models", "/models"):
            get(prefix, self.models)
            get(prefix + "/{model:.+}", self.model)
        get("/running", self.running)
        get("/api/version", self.version)
        OpenApiPage().add_to(app)
        get("/logs", self.logs)
        get("/logs/stream", self.log_stream)
        get("/logs/stream/{model:.+}", self.log_stream)
        post("/models/load", self.load)
        post("/models/unload", self.unload)
        post("/models/reload", self.reload)
        post("/models/reset", self.reset)
        get("/unload", self.unload_all)

    async def root(self, request: web.Request) -> web.Response:
        """Who answers here; a browser is sent on to the page."""
        if "text/html" in request.headers.get("Accept", ""):
            raise web.HTTPFound("ui")
        return json_answer(
            {"name": "mlx-isolate", "version": self._daemon.version, "status": "/status"}
        )

    async def live(self, _: web.Request) -> web.Response:
        """The process runs its loop."""
        return json_answer({"status": "alive"})

    async def health(self, _: web.Request) -> web.Response:
        """Whether requests can be served."""
        models = self._daemon.pool.snapshot()
        code, body = models_page.health(models, is_stopping=self._daemon.is_stopping)
        return json_answer(body, code)

    async def ready(self, _: web.Request) -> web.Response:
        """Whether everything that should be up is ready."""
        models = self._daemon.pool.snapshot()
        code, body = models_page.readiness(models, is_stopping=self._daemon.is_stopping)
        return json_answer(body, code)

    async def status(self, _: web.Request) -> web.Response:
        """The supervisor and its models in full."""
        return json_answer(self._daemon.status())

    async def models(self, _: web.Request) -> web.Response:
        """The models that clients may name."""
        daemon = self._daemon
        models = daemon.pool.snapshot()
        return json_answer(models_page.model_list(models, daemon.unlisted, int(daemon.started_at)))

    async def model(self, request: web.Request) -> web.Response:
        """One model, by id or alias."""
        found = self._find(request.match_info["model"])
        return json_answer(models_page.model_object(found, int(self._daemon.started_at)))

    async def running(self, _: web.Request) -> web.Response:
        """The models that have an engine."""
        return json_answer(models_page.running_list(self._daemon.pool.snapshot()))

    async def version(self, _: web.Request) -> web.Response:
        """The installed version."""
        return json_answer({"version": self._daemon.version})

    async def logs(self, request: web.Request) -> web.Response:
        """The last lines as text; `?model=` one model's, `?lines=` how many."""
        model = request.query.get("model")
        if model is not None:
            model = self._find(model).id
        lines = self._daemon.book.tail(_line_count(request), model)
        return web.Response(text="".join(line + "\n" for line in lines))

    async def log_stream(self, request: web.Request) -> web.StreamResponse:
        """The last lines and then every new one, until the caller leaves."""
        model = request.match_info.get("model", request.query.get("model"))
        if model is not None:
            model = self._find(model).id
        return await self._followers.serve(request, _line_count(request), model)

    async def load(self, request: web.Request) -> web.Response:
        """Load a model; answers when it is ready."""
        daemon, model = self._daemon, await self._asked(request)
        return json_answer(await daemon.pool.ensure_ready(model, daemon.load_timeout_s))

    async def unload(self, request: web.Request) -> web.Response:
        """Drain and stop a model's engine; answers when it is gone."""
        return await self._control(request, self._daemon.pool.unload)

    async def reload(self, request: web.Request) -> web.Response:
        """Replace a model's engine; answers when the new one is ready or has failed."""
        return await self._control(request, self._daemon.pool.reload)

    async def reset(self, request: web.Request) -> web.Response:
        """Forget a model's failures; answers at once."""

        async def reset(model: str) -> None:
            self._daemon.pool.reset(model)

        return await self._control(request, reset)

    async def unload_all(self, request: web.Request) -> web.Response:
        """llama-swap's way to unload everything."""
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            # A GET needs no preflight, so any page could ask for it with an image.
            raise RequestError(
                "A page of another site may not do this.", status=403, code="origin_not_allowed"
            )
        pool = self._daemon.pool
        await asyncio.gather(*(pool.unload(model) for model in pool.model_ids))
        return web.Response(text="OK")

    async def _control(
        self, request: web.Request, act: Callable[[str], Awaitable[None]]
    ) -> web.Response:
        model = await self._asked(request)
        await act(model)
        return json_answer(self._find(model))

    async def _asked(self, request: web.Request) -> str:
        """The id of the model that a control request names."""
        return self._daemon.pool.find(await asked_model(request)).model_id

    def _find(self, name: str) -> ModelStatus:
        model_id = self._daemon.pool.find(name).model_id
        return next(s for s in self._daemon.pool.snapshot() if s.id == model_id)


def _line_count(request: web.Request) -> int:
    return whole_number(request, "lines", BOOK_LINES_MAX, BOOK_LINES_MAX)
