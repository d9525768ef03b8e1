"""Connections to an engine: kept and used again, never trusted beyond what they carried, none left."""

import asyncio
from collections.abc import Callable

import pytest

from mlx_isolate_supervisor.relay.limits import CONNECT_TRIES_MAX
from mlx_isolate_supervisor.relay.pool import EnginePool
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import (
    END,
    JSON_HEAD,
    SSE_HEAD,
    EngineSide,
    ScriptedEngine,
    event,
    whole,
)
from tests.integration.relay.rig import Rig, make_rig, run, soon
from tests.waiting import wait_until


def test_a_request_whose_engine_cannot_be_reached_waits_for_the_next_one() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            await rig.engine.kill()
            rig.slot.may_enter.clear()
            client = await rig.connect()
            await client.post(b"{}")
            await wait_until(lambda: rig.slot.waiting, 2)
            rig.slot.may_enter.set()
            assert await rig.slot.outcome() == "returned"
            rig.slot.may_enter.clear()
            respawned = ScriptedEngine(rig.engine.path + "2")
            await respawned.start()
            rig.slot.engine = respawned
            rig.slot.may_enter.set()
            side = await respawned.accept()
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            await respawned.kill()

    run(scenario())


def test_an_engine_that_can_never_be_reached_fails_the_request_in_the_end() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            await rig.engine.kill()
            client = await rig.connect()
            await client.post(b"{}")
            assert (await client.read_answer()).status == 502
            outcomes = [await rig.slot.outcome() for _ in range(CONNECT_TRIES_MAX)]
            assert outcomes == ["returned"] * (CONNECT_TRIES_MAX - 1) + ["failed"]

    run(scenario())


async def sequence(rig: Rig, client: Client, side: EngineSide | None) -> EngineSide:
    """One plain request on the client's connection; over `side` if that is given."""
    await client.post(b"{}")
    if side is None:
        side = await rig.engine.accept()
    await side.read_request()
    await side.send(whole(b"{}"))
    assert (await client.read_answer()).status == 200
    return side


def test_connections_to_the_engine_are_kept_between_requests() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            side = await sequence(rig, client, None)
            for _ in range(9):
                await sequence(rig, client, side)
            assert rig.engine.connections == 1

    run(scenario())


@pytest.mark.case("27")
def test_a_kept_connection_that_the_engine_closed_is_not_used_again() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            side = await sequence(rig, client, None)
            for _ in range(50):
                side.writer.transport.abort()  # the relay's loop has not seen this yet
                side = await sequence(rig, client, None)
            assert rig.engine.connections == 51

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"{}", JSON_HEAD + b"Connection: close\r\n"),
        whole(b"{}", b"HTTP/1.0 200 OK\r\n"),
        whole(b"{}") + b"surplus",
    ],
)
def test_a_connection_that_cannot_be_trusted_is_not_kept(answer: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(answer)
            assert (await client.read_answer()).body == b"{}"
            await soon(side.wait_closed_by_relay())
            await sequence(rig, client, None)

    run(scenario())


@pytest.mark.case("14")
def test_a_request_is_never_sent_to_an_engine_twice() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            side = await sequence(rig, client, None)
            await client.post(b'{"once":1}')
            await side.read_request()
            side.reset()
            assert (await client.read_answer()).status == 502
            assert rig.engine.connections == 1

    run(scenario())


def test_no_descriptor_is_left_by_requests_that_end_in_any_way() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            before = rig.descriptors()
            for number in range(30):
                client, side = await rig.open_stream()
                if number % 3 == 0:
                    client.reset()
                elif number % 3 == 1:
                    side.reset()
                    await soon(client.read_end())
                else:
                    await side.send(END)
                    await client.read_chunk()
                await rig.slot.outcome()
                client.leave()
                side.close()
            await wait_until(lambda: rig.descriptors() <= before + 3, 5)

    run(scenario())


class Sink:
    """Takes a body."""

    writing_paused = False

    def __init__(self) -> None:
        self.taken = b""

    def begin(self, block: bytes) -> None:
        self.taken += block

    def write(self, block: bytes) -> None:
        self.taken += block

    async def drain(self, is_over: Callable[[], bool]) -> None:
        raise AssertionError


@pytest.mark.parametrize("stray", [event("stray"), event("str")[:5]], ids=["event", "part"])
def test_what_an_engine_says_behind_an_end_is_passed_to_nobody(stray: bytes) -> None:
    """However soon it comes: before whoever waits for the end has been told of it."""

    async def scenario() -> None:
        async with make_rig() as rig:
            connection, sink = await EnginePool().take(rig.engine.path), Sink()
            connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
            connection.data_received(SSE_HEAD + event("one"))
            await connection.wait_head()
            passing = asyncio.create_task(connection.pass_body(sink))
            await asyncio.sleep(0)
            for piece in (event("two"), END, stray):
                connection.data_received(piece)
            await passing
            assert sink.taken == event("one") + event("two")
            assert not connection.is_reusable
            connection.close()

    run(scenario())
