"""A relay between raw sockets in one event loop: every byte and every moment is the test's."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop
from aiohttp import web

from mlx_isolate_supervisor.relay.client import client_factory, runner_options
from mlx_isolate_supervisor.relay.edge import Edge
from mlx_isolate_supervisor.relay.exchange import CANCELLED_BY_OPERATOR, Exchange
from mlx_isolate_supervisor.relay.forward import Relay
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.pool import EnginePool
from mlx_isolate_supervisor.relay.work import mount
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import SSE_HEAD, EngineSide, ScriptedEngine, event
from tests.integration.relay.fake_slot import FakeRouter, FakeSlot

# Every wait on a socket in these tests ends by then; none should come near it.
DEADLINE_S = 20.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run one test's scenario on uvloop, as the supervisor does, with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


class Recorder:
    """An observer that keeps every exchange and checks the order of its calls."""

    def __init__(self) -> None:
        self.running: dict[int, Exchange] = {}
        self._tasks: dict[int, asyncio.Task[Any] | None] = {}
        self.ended_ones: list[Exchange] = []
        self.all_ended = asyncio.Event()
        self.all_ended.set()

    def started(self, exchange: Exchange) -> None:
        self.running[id(exchange)] = exchange
        self._tasks[id(exchange)] = asyncio.current_task()
        self.all_ended.clear()

    def leased(self, exchange: Exchange) -> None:
        assert id(exchange) in self.running

    def first_byte(self, exchange: Exchange) -> None:
        assert id(exchange) in self.running

    def ended(self, exchange: Exchange) -> None:
        del self.running[id(exchange)]
        self.ended_ones.append(exchange)
        if not self.running:
            self.all_ended.set()

    def cancel_all(self) -> None:
        """What an operator's cancel does."""
        for key in self.running:
            task = self._tasks[key]
            assert task is not None
            task.cancel(CANCELLED_BY_OPERATOR)


class Rig:
    """One relay application with one slot and one scripted engine."""

    def __init__(self, engine: ScriptedEngine, slot: FakeSlot, recorder: Recorder) -> None:
        self.router = FakeRouter(slot)
        self.engine = engine
        self.slot = slot
        self.recorder = recorder
        self.port = 0
        self.relay: Relay | None = None
        self.runner: web.AppRunner | None = None
        self._clients: list[Client] = []

    @property
    def body_bytes_held(self) -> int:
        """Bytes of request bodies that no engine has answered to yet."""
        assert self.relay is not None
        return self.relay._bodies.held  # pyright: ignore[reportPrivateUsage]

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=80 << 20)
        client = Client(reader, writer)
        self._clients.append(client)
        return client

    async def ask(self, body: bytes = b"{}", headers: bytes = b"") -> tuple[Client, EngineSide]:
        """A client whose request has reached the engine."""
        client = await self.connect()
        await client.post(body, headers=headers)
        side = await self.engine.accept()
        await side.read_request()
        return client, side

    async def open_stream(self, body: bytes = b'{"stream":true}') -> tuple[Client, EngineSide]:
        """As `ask`, with the stream's head and one event already at the client."""
        client, side = await self.ask(body)
        await side.send(SSE_HEAD + event("first"))
        await client.read_head()
        assert await client.read_chunk() == b"data: first\n\n"
        return client, side

    async def stop(self) -> None:
        """Stop the application as a shutdown does."""
        assert self.runner is not None
        await self.runner.cleanup()

    def connections(self) -> list[web.RequestHandler]:
        """The relay's ends of its clients' connections."""
        assert self.runner is not None and self.runner.server is not None
        return self.runner.server.connections

    def unsent_bytes(self) -> int:
        """What the relay has written to its clients and the kernel has not taken."""
        transports = [connection.transport for connection in self.connections()]
        return sum(one.get_write_buffer_size() for one in transports if one is not None)

    def descriptors(self) -> int:
        """Open descriptors of this process."""
        return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))

    def close_clients(self) -> None:
        for client in self._clients:
            client.writer.close()


@asynccontextmanager
async def make_rig(
    limits: RelayLimits | None = None,
    origins: tuple[str, ...] = ("loopback",),
    extra: Callable[[web.Application], None] | None = None,
    pool: EnginePool | None = None,
) -> AsyncGenerator[Rig]:
    """A rig on loopback; afterwards every lease must be released once and nothing be left."""
    limits = limits or RelayLimits()
    folder = tempfile.mkdtemp(prefix="mi")
    engine = ScriptedEngine(os.path.join(folder, "e.sock"))
    slot = FakeSlot("m", engine)
    rig = Rig(engine, slot, Recorder())
    app = web.Application()
    Edge(
        OriginPolicy(allowed=origins), HostPolicy(bound_host="127.0.0.1"), limits.header_bytes_max
    ).install(app)
    rig.relay = Relay(rig.router, limits, rig.recorder, pool)
    mount(app, rig.relay)
    if extra is not None:
        extra(app)
    runner = web.AppRunner(app, shutdown_timeout=0.1, **runner_options(limits))
    rig.runner = runner
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        await engine.start()
        stack.push_async_callback(engine.kill)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        server = await asyncio.get_running_loop().create_server(
            client_factory(runner, limits), "127.0.0.1", 0
        )
        stack.callback(server.close)
        rig.port = server.sockets[0].getsockname()[1]
        stack.callback(rig.close_clients)
        yield rig
        await rig.recorder.all_ended.wait()
        slot.assert_all_released_once()
        assert rig.body_bytes_held == 0


async def soon(awaitable: Awaitable[Any], within_s: float = 1.0) -> Any:
    """Await what must come quickly."""
    async with asyncio.timeout(within_s):
        return await awaitable
