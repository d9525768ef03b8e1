"""The work endpoints: the paths whose requests go to an engine."""

from aiohttp import web

from mlx_isolate_supervisor.lease import Router
from mlx_isolate_supervisor.relay.edge import answer_expect
from mlx_isolate_supervisor.relay.exchange import RelayObserver
from mlx_isolate_supervisor.relay.forward import Relay
from mlx_isolate_supervisor.relay.limits import RelayLimits

# Path on this server → path on the engine. Queries are kept.
WORK_PATHS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
    "/v1/responses": "/v1/responses",
    "/v1/messages": "/v1/messages",
    "/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/embeddings": "/v1/embeddings",
}


def add_work_routes(
    app: web.Application,
    router: Router,
    limits: RelayLimits,
    observer: RelayObserver | None = None,
) -> Relay:
    """Mount POST handlers for every work endpoint; the returned relay ends with `app`.

    The application must run with `runner_options(limits)`, behind `Edge.install(app)`.
    """
    relay = Relay(router, limits, observer)
    mount(app, relay)
    return relay


def mount(app: web.Application, relay: Relay) -> None:
    """Let `relay` serve the work endpoints of `app`, and end with it."""
    for path, engine_path in WORK_PATHS.items():
        app.router.add_route("POST", path, relay.handler(engine_path), expect_handler=answer_expect)

    async def end_running(_: web.Application) -> None:
        await relay.end_running()

    async def close(_: web.Application) -> None:
        relay.close()

    app.on_shutdown.append(end_running)
    app.on_cleanup.append(close)
