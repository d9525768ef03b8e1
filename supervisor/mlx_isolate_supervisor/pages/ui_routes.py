"""The endpoints of the page and of those who watch: /ui, /events, /metrics, /history, /v1/requests.

All are answered from memory; none waits for an engine.
"""

import asyncio
import os
import signal

import msgspec
from aiohttp import web

from mlx_isolate_shared.errors import RequestError
from mlx_isolate_supervisor.pages.asked import asked_model, whole_number
from mlx_isolate_supervisor.pages.json_answer import json_answer
from mlx_isolate_supervisor.pages.page import Page
from mlx_isolate_supervisor.telemetry.events import EventReader, SlowReader
from mlx_isolate_supervisor.telemetry.observability import Observability

# Silence before a comment, so that a reader can tell a quiet stream from a dead one.
KEEPALIVE_S = 15.0
# A reader that takes nothing for this long is dropped; it comes back with its last event id.
STALLED_READER_S = 10.0
# Bytes that may wait in the transport of one reader before a write waits.
WRITE_BUFFER_BYTES = 16 * 1024
REPLAY_MAX = 1024

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def add_ui_routes(app: web.Application, watch: Observability, *, metrics: bool = True) -> None:
    """Mount everything here and tie `watch` to the life of `app`.

    Args:
        metrics: whether /metrics answers.
    """
    endpoints = _Endpoints(watch)
    Page().add_routes(app)
    app.router.add_get("/events", endpoints.events)
    app.router.add_get("/history", endpoints.history)
    app.router.add_get("/v1/requests", endpoints.requests)
    app.router.add_post("/v1/requests/{id}/cancel", endpoints.cancel)
    app.router.add_post("/drill/kill", endpoints.kill)
    if metrics:
        app.router.add_get("/metrics", endpoints.metrics)

    async def start(_: web.Application) -> None:
        watch.start()

    async def end_readers(_: web.Application) -> None:
        # Before the server waits for open connections: readers would keep it waiting.
        await watch.stop()

    app.on_startup.append(start)
    app.on_shutdown.append(end_readers)


class _Endpoints:
    """Handlers over one Observability."""

    def __init__(self, watch: Observability) -> None:
        self._watch = watch

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events; `Last-Event-ID`, or `?replay=N` events back; `?model=` filters."""
        reader = self._watch.events.subscribe(
            last_event_id=request.headers.get("Last-Event-ID") or request.query.get("after"),
            replay=whole_number(request, "replay", 0, REPLAY_MAX),
            model=request.query.get("model"),
        )
        try:
            response = web.StreamResponse(headers=SSE_HEADERS)
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            if not await _copy(reader, response) and request.transport is not None:
                # Cut, not closed: what waits in the transport would be held for it for ever.
                request.transport.abort()
        finally:
            reader.close()
        return response

    async def history(self, request: web.Request) -> web.Response:
        """The charts' samples with a time above `?since=` (seconds since the epoch)."""
        since = request.query.get("since", "0")
        try:
            body = self._watch.history.encode(float(since), self._watch.clock.wall())
        except ValueError:
            raise RequestError("since is a time in seconds.", param="since") from None
        return json_answer(msgspec.Raw(body))

    async def requests(self, request: web.Request) -> web.Response:
        """Running requests, oldest first."""
        return json_answer({"requests": self._watch.requests.view()})

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel the running requests that have this id."""
        count = self._watch.requests.cancel(request.match_info["id"])
        return json_answer({"cancelled": count})

    async def kill(self, request: web.Request) -> web.Response:
        """SIGKILL to a model's engine: the button that shows what a crash costs."""
        model = self._watch.status().model(await asked_model(request))
        if model is None:
            raise RequestError(
                "There is no such model.", status=404, code="model_not_found", param="model"
            )
        if model.pid is None:
            raise RequestError(
                "This model has no engine to kill.", status=409, code="no_engine", param="model"
            )
        # The pid cannot have been given to another process: its parent, the supervisor, reaps
        # an engine and forgets its pid in the same step.
        os.kill(model.pid, signal.SIGKILL)
        self._watch.events.publish(
            "drill.kill", model=model.id, incarnation=model.incarnation, pid=model.pid
        )
        return json_answer({"pid": model.pid, "incarnation": model.incarnation})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        from mlx_isolate_supervisor.telemetry import exposition

        watch = self._watch
        body = exposition.write_metrics(
            watch.metrics, watch.status(), watch.events, watch.requests.in_flight()
        )
        return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})


async def _copy(reader: EventReader, response: web.StreamResponse) -> bool:
    """Send events until the hub closes or the client leaves; False if it was too slow."""
    try:
        while (frames := await reader.read(KEEPALIVE_S)) is not None:
            async with asyncio.timeout(STALLED_READER_S):
                await response.write(frames or b": keepalive\n\n")
        await response.write_eof()
    except (SlowReader, TimeoutError):
        reader.close(slow=True)
        return False
    except ConnectionError:
        pass  # the client has gone
    return True
