"""One request to one engine and back."""

from aiohttp import web
from aiohttp.typedefs import Handler

from mlx_isolate_supervisor.lease import Router
from mlx_isolate_supervisor.relay.exchange import RelayObserver, SilentObserver
from mlx_isolate_supervisor.relay.limits import RelayLimits


class Relay:
    """Carries requests of the work endpoints.

    Args:
        router: finds a request's slot.
        limits: bounds of bodies and times.
        observer: told of each request's start, lease, first byte and end.
    """

    def __init__(
        self, router: Router, limits: RelayLimits, observer: RelayObserver | None = None
    ) -> None:
        self._router = router
        self._limits = limits
        self._observer = observer or SilentObserver()

    def handler(self, engine_path: str) -> Handler:
        """The aiohttp handler for requests that go to `engine_path` on an engine."""

        async def handle(request: web.Request) -> web.StreamResponse:
            raise web.HTTPNotImplemented

        return handle

    def close(self) -> None:
        """Drop idle connections to engines."""
