"""The relay as an application of its own, for its bench: one slot that always has a place.

Run as `python -m bench.relay_server SOCKET PORT`.
"""

import asyncio
import sys

import uvloop
from aiohttp import web

from mlx_isolate_shared.errors import EngineError
from mlx_isolate_supervisor.lease import Outcome
from mlx_isolate_supervisor.relay.client import client_factory, runner_options
from mlx_isolate_supervisor.relay.edge import Edge
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.work import add_work_routes


class FreeSlot:
    """A slot, a router and a lease at once: everything goes to one engine at any time."""

    model_id = "m"
    incarnation = 1

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    def find(self, model: str | None) -> "FreeSlot":
        """The only slot."""
        return self

    async def admit(self, request_id: str) -> "FreeSlot":
        """A place, at once."""
        return self

    async def death(self) -> EngineError:
        """The only reason there is."""
        return EngineError("The engine died.", status=502, code="engine_died")

    def release(self, outcome: Outcome) -> None:
        """Nothing is counted."""


async def health(_: web.Request) -> web.Response:
    """A page that is answered from memory."""
    return web.json_response({"status": "ok"})


async def serve(socket_path: str, port: int) -> None:
    """Listen until the process is killed."""
    limits = RelayLimits()
    app = web.Application()
    Edge(OriginPolicy(), HostPolicy(bound_host="127.0.0.1"), limits.header_bytes_max).install(app)
    app.router.add_get("/health", health)
    add_work_routes(app, FreeSlot(socket_path), limits)
    runner = web.AppRunner(app, **runner_options(limits))
    await runner.setup()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(client_factory(runner, limits), "127.0.0.1", port)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
