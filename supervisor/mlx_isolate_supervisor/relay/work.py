"""The work endpoints: the paths whose requests go to an engine."""

from aiohttp import web

from mlx_isolate_supervisor.relay.edge import continue_later
from mlx_isolate_supervisor.relay.exchange import RelayObserver
from mlx_isolate_supervisor.relay.forward import Relay
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.target import ALIASES, UPSTREAM, WORK_PATHS
from mlx_isolate_supervisor.slots.lease import Router


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
    paths = {path: path for path in sorted(WORK_PATHS)} | ALIASES
    for path, engine_path in paths.items():
        app.router.add_route(
            "POST", path, relay.handler(engine_path), expect_handler=continue_later
        )
    app.router.add_route(
        "*", UPSTREAM + "{rest:.+}", relay.handle_upstream, expect_handler=continue_later
    )

    async def end_running(_: web.Application) -> None:
        await relay.end_running()

    async def close(_: web.Application) -> None:
        relay.close()

    app.on_shutdown.append(end_running)
    app.on_cleanup.append(close)
