"""A client leaves, by FIN or by RST, at each moment of its request: its place is free at once."""

import asyncio
from collections.abc import Callable

import pytest

from mlx_isolate_supervisor.relay.limits import ANSWER_WHOLE_BYTES_MAX
from mlx_isolate_supervisor.relay.pool import EnginePool
from mlx_isolate_supervisor.relay.upstream import EngineConnection
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import END, JSON_HEAD, event, whole
from tests.integration.relay.rig import make_rig, run, soon
from tests.waiting import wait_until

Leave = Callable[[Client], None]
FIN: Leave = Client.leave
RST: Leave = Client.reset
leaving = pytest.mark.parametrize("leave", [FIN, RST], ids=["fin", "rst"])


@leaving
def test_a_client_that_leaves_during_its_upload_is_cancelled(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n123"
            )
            await wait_until(lambda: rig.recorder.running, 2)
            leave(client)
            await soon(rig.recorder.all_ended.wait())
            assert rig.recorder.ended_ones[0].outcome == "cancelled"
            assert rig.slot.leases == []

    run(scenario())


@leaving
def test_a_client_that_leaves_the_queue_takes_no_place(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.may_enter.clear()
            client = await rig.connect()
            await client.post(b"{}")
            await wait_until(lambda: rig.slot.waiting, 2)
            leave(client)
            await wait_until(lambda: not rig.slot.waiting, 1)
            await soon(rig.recorder.all_ended.wait())
            assert rig.recorder.ended_ones[0].outcome == "cancelled"
            assert rig.slot.leases == [] and rig.engine.connections == 0

    run(scenario())


@leaving
@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-"], ids=["nothing", "half head"]
)
def test_a_client_that_leaves_before_the_headers_is_cancelled_at_the_engine(
    leave: Leave, sent: bytes
) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(sent)
            leave(client)
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


@leaving
def test_a_client_that_leaves_in_the_middle_of_a_plain_answer_is_cancelled(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(JSON_HEAD + b"Content-Length: 100\r\n\r\n12345")
            leave(client)
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


@pytest.mark.case("09")
@leaving
def test_a_client_that_leaves_its_stream_is_cancelled_at_the_engine(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            other, other_side = await rig.open_stream()
            client, side = await rig.open_stream()
            leave(client)
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "cancelled"
            await other_side.send(event("still here") + END)
            assert await other.read_chunk() == b"data: still here\n\n"
            assert await rig.slot.outcome() == "answered"

    run(scenario())


@leaving
def test_a_client_that_leaves_while_the_reason_of_a_death_is_unknown(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.death_known.clear()
            client, side = await rig.ask()
            side.reset()
            await wait_until(lambda: rig.slot.dying, 2)
            leave(client)
            await soon(rig.recorder.all_ended.wait())
            assert rig.recorder.ended_ones[0].outcome == "cancelled"

    run(scenario())


@leaving
def test_a_client_that_leaves_while_its_engine_is_connected_to(leave: Leave) -> None:
    class SlowPool(EnginePool):
        """Connections that take until the test ends."""

        def __init__(self) -> None:
            super().__init__()
            self.connecting = asyncio.Event()

        async def take(self, socket_path: str) -> EngineConnection:
            self.connecting.set()
            await asyncio.Event().wait()
            return await super().take(socket_path)

    async def scenario() -> None:
        pool = SlowPool()
        async with make_rig(pool=pool) as rig:
            client = await rig.connect()
            await client.post(b"{}")
            await pool.connecting.wait()
            leave(client)
            assert await soon(rig.slot.outcome()) == "cancelled"
            assert rig.engine.connections == 0

    run(scenario())


@leaving
def test_a_client_that_leaves_while_the_reason_of_a_death_in_its_stream_is_unknown(
    leave: Leave,
) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.death_known.clear()
            client, side = await rig.open_stream()
            side.reset()
            await wait_until(lambda: rig.slot.dying, 2)
            leave(client)
            assert await soon(rig.slot.outcome()) == "cancelled"

    run(scenario())


@leaving
def test_a_client_that_leaves_with_a_plain_answer_unread(leave: Leave) -> None:
    """Its engine has been given back before: a client that does not read holds no place."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            client.pause()
            answers = 0
            body = bytes(ANSWER_WHOLE_BYTES_MAX)
            await client.post(b"{}")
            side = await rig.engine.accept()
            while True:
                await side.read_request()
                await side.send(whole(body))
                assert await rig.slot.outcome() == "answered"
                answers += 1
                if rig.recorder.running:
                    break  # the kernel's buffers are full: this answer waits for its reader
                await client.post(b"{}")
            assert answers < 30
            leave(client)
            await soon(rig.recorder.all_ended.wait(), 5)
            assert rig.recorder.ended_ones[-1].outcome == "cancelled"

    run(scenario())


@leaving
def test_a_stalled_client_that_leaves_is_cancelled_at_the_engine(leave: Leave) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            client.pause()
            sending = asyncio.create_task(side.flood())
            await wait_until(lambda: side.is_blocked, 5)
            leave(client)
            await soon(sending, 5)
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())
