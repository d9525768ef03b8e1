"""A relay between raw sockets in one event loop: every byte and every moment is the test's."""

import asyncio
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import uvloop
from aiohttp import web

from mlx_isolate_shared.errors import EngineError, HttpError, RequestError
from mlx_isolate_supervisor.relay.client import client_factory, runner_options
from mlx_isolate_supervisor.relay.edge import Edge
from mlx_isolate_supervisor.relay.exchange import CANCELLED_BY_OPERATOR, Exchange
from mlx_isolate_supervisor.relay.forward import Relay
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.pool import EnginePool
from mlx_isolate_supervisor.relay.work import mount
from mlx_isolate_supervisor.slots.lease import Outcome

# Every wait on a socket in these tests ends by then; none should come near it.
DEADLINE_S = 20.0

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run one test's scenario on uvloop, as the supervisor does, with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def chunk(payload: bytes) -> bytes:
    """One chunk as an engine frames it."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One SSE event in one chunk."""
    return chunk(f"data: {text}\n\n".encode())


def whole(body: bytes, head: bytes = JSON_HEAD) -> bytes:
    """An answer with a Content-Length."""
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


class EngineSide:
    """The engine's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.flooded_bytes = 0

    @property
    def is_blocked(self) -> bool:
        """Whether the relay has stopped reading what was sent."""
        return self.writer.transport.get_write_buffer_size() > 0

    async def read_head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def read_request(self) -> tuple[bytes, bytes]:
        """The head (with its blank line) and the body of the next request."""
        head = await self.read_head()
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return head, await self._reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def read_rest(self) -> bytes:
        """Everything up to the end of what the relay sends."""
        return await self._reader.read()

    async def flood(self, payload: bytes = b"data: " + b"x" * 1000 + b"\n\n") -> None:
        """Send events until the relay closes the connection."""
        await self.flood_with(chunk(payload))

    async def flood_with(self, block: bytes) -> None:
        """Send the same bytes until the relay closes the connection."""
        try:
            while not self._reader.at_eof():
                self.writer.write(block)
                await self.writer.drain()
                self.flooded_bytes += len(block)
                if self.flooded_bytes % (50 * len(block)) == 0:
                    await asyncio.sleep(0)
        except ConnectionError:
            pass

    async def wait_closed_by_relay(self) -> None:
        """Wait for the relay to close the connection; anything else it sends is a fault."""
        try:
            rest = await self._reader.read()
        except ConnectionResetError:
            rest = b""
        assert rest == b"", f"the relay sent more: {rest[:200]!r}"

    def pause(self) -> None:
        """Stop reading."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume(self) -> None:
        """Read again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Die as a killed process does: at once, with what it had not read dropped."""
        self.writer.transport.abort()


class ScriptedEngine:
    """Listens on a unix socket; the test takes each connection as it comes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrived: asyncio.Queue[EngineSide] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self.connections = 0
        self._sides: list[EngineSide] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.path, limit=80 << 20)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        side = EngineSide(reader, writer)
        self._sides.append(side)
        self._arrived.put_nowait(side)

    async def accept(self) -> EngineSide:
        return await self._arrived.get()

    async def kill(self) -> None:
        """End as SIGKILL ends an engine: every connection, and the listener; the file stays."""
        if self._server is not None:
            self._server.close()
        for side in self._sides:
            side.reset()


class FakeLease:
    """A place that remembers how it was given back."""

    def __init__(self, admission: "FakeSlot", socket_path: str, incarnation: int) -> None:
        self._admission = admission
        self.socket_path = socket_path
        self.incarnation = incarnation
        self.outcomes: list[Outcome] = []
        self.is_upgraded = False
        self._on_death: Callable[[], None] | None = None

    def on_death(self, call: Callable[[], None]) -> None:
        self._on_death = call

    @property
    def is_watched(self) -> bool:
        """Whether the relay, its request sent, waits to be told of a death."""
        return self._on_death is not None

    def tell_death(self) -> None:
        """As when the engine is known to be dying while its sockets are still open."""
        assert self._on_death is not None
        self._on_death()

    async def death(self) -> EngineError:
        self._admission.dying += 1
        await self._admission.death_known.wait()
        return self._admission.reason

    def note_upgrade(self) -> None:
        self.is_upgraded = True

    def release(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._admission.released.put_nowait(outcome)


class FakeSlot:
    """An admission that is under the test's control.

    Attributes:
        may_enter: requests wait in `admit` until this is set.
        death_known: `death()` waits until this is set.
        refusal: raised by `admit` instead of giving a lease.
        kept_alive: what requests asked for, in seconds.
        sends_loading_state, waits_for: what streaming clients are told while they wait.
    """

    def __init__(self, model_id: str, engine: ScriptedEngine) -> None:
        self.model_id = model_id
        self.engine = engine
        self.incarnation = 1
        self.may_enter = asyncio.Event()
        self.may_enter.set()
        self.death_known = asyncio.Event()
        self.death_known.set()
        self.reason = EngineError(
            "The engine died (SIGKILL).", status=502, code="engine_died", retry_after_s=1.0
        )
        self.refusal: HttpError | None = None
        self.waiting = 0
        self.dying = 0
        self.leases: list[FakeLease] = []
        self.released: asyncio.Queue[Outcome] = asyncio.Queue()
        self.kept_alive: list[float] = []
        self.sends_loading_state = False
        self.waits_for = "m is loading"

    def describe_wait(self) -> str:
        """See `lease.Admission`."""
        return self.waits_for

    def keep_alive(self, idle_s: float) -> None:
        """See `lease.Admission`."""
        self.kept_alive.append(idle_s)

    async def admit(self, request_id: str) -> FakeLease:
        self.waiting += 1
        try:
            await self.may_enter.wait()
        finally:
            self.waiting -= 1
        if self.refusal is not None:
            raise self.refusal
        lease = FakeLease(self, self.engine.path, self.incarnation)
        self.leases.append(lease)
        return lease

    async def outcome(self) -> Outcome:
        """The next outcome that a lease was given back with."""
        return await self.released.get()

    def assert_all_released_once(self) -> None:
        assert all(len(lease.outcomes) == 1 for lease in self.leases), [
            lease.outcomes for lease in self.leases
        ]


class FakeRouter:
    def __init__(self, slot: FakeSlot) -> None:
        self._slot = slot

    def knows(self, model: str) -> bool:
        return model == self._slot.model_id

    def find(self, model: str | None) -> FakeSlot:
        if model is None or model == self._slot.model_id:
            return self._slot
        raise RequestError(
            f"There is no model {model!r}; there is: {self._slot.model_id}.",
            status=404,
            code="model_not_found",
            param="model",
        )


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


class Answer:
    """One answer as a client read it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = [
            (name.lower(), value.strip())
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        ]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str:
        (value,) = self.all(name)
        return value


class Client:
    """A client's end of one TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(
        self, body: bytes, path: str = "/v1/chat/completions", headers: bytes = b""
    ) -> None:
        await self.send(post(body, path, headers))

    async def read_head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def read_chunk(self) -> bytes:
        """One chunk's payload; b"" is the terminator."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def read_answer(self) -> Answer:
        """A whole answer, by its own framing."""
        head = await self.read_head()
        answer = Answer(head, b"")
        if answer.all("transfer-encoding"):
            parts: list[bytes] = []
            while part := await self.read_chunk():
                parts.append(part)
            answer.body = b"".join(parts)
        elif answer.all("content-length"):
            answer.body = await self.reader.readexactly(int(answer.one("content-length")))
        return answer

    async def read_end(self) -> bytes:
        """What still came of a chunked body, its terminator included."""
        return await self.reader.readuntil(END)

    async def wait_closed(self) -> bytes:
        """What still came until the relay closed the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    def pause(self) -> None:
        """Stop reading."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume(self) -> None:
        """Read again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def leave(self) -> None:
        """Close in form (FIN)."""
        self.writer.close()

    def reset(self) -> None:
        """Close by RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(body: bytes, path: str = "/v1/chat/completions", headers: bytes = b"") -> bytes:
    """A POST request with a Content-Length."""
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b"
    ) % (path.encode(), len(body), headers, body)


class Rig:
    """One relay application with one slot and one scripted engine."""

    def __init__(self, engine: ScriptedEngine, slot: FakeSlot, recorder: Recorder) -> None:
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
    rig.relay = Relay(FakeRouter(slot), limits, rig.recorder, pool)
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
