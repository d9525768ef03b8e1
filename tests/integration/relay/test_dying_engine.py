"""An engine of which nothing runs any more, while the kernel still holds its sockets open."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from mlx_isolate_supervisor.relay.engine_gone import EngineGone, RequestUnread
from mlx_isolate_supervisor.relay.limits import CONNECT_TRIES_MAX
from mlx_isolate_supervisor.relay.upstream import EngineConnection
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import ScriptedEngine, event, whole
from tests.integration.relay.rig import Rig, make_rig, run, soon
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells what a closed socket had not read"
)


def error_code(payload: bytes) -> object:
    """The code of an error event."""
    assert payload.startswith(b"data: ")
    return json.loads(payload[6:])["error"]["code"]


class Deaf:
    """Listens where an engine would, and reads nothing: an engine at the moment of its death."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._sides: list[socket.socket] = []

    async def accept(self) -> socket.socket:
        side, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self._sides.append(side)
        return side

    def close(self) -> None:
        """As the kernel does at the end: connections that were never accepted, too."""
        for side in self._sides:
            side.close()
        self._listener.close()


@asynccontextmanager
async def deaf_engine(rig: Rig) -> AsyncGenerator[Deaf]:
    """The rig's slot leads to an engine that reads nothing."""
    rig.slot.engine = ScriptedEngine(rig.engine.path + "d")
    deaf = Deaf(rig.slot.engine.path)
    try:
        yield deaf
    finally:
        deaf.close()


async def hand_over(rig: Rig, body: bytes) -> Client:
    """A client whose request has been written to the engine; whoever comes next must wait."""
    client = await rig.connect()
    await client.post(body)
    await wait_until(lambda: rig.slot.leases, 5, "a place was given")
    await wait_until(lambda: rig.slot.leases[0].is_watched, 5, "the request is out")
    rig.slot.may_enter.clear()
    return client


async def serve_next(rig: Rig, client: Client, body: bytes) -> None:
    """The respawn gets the same request and answers it."""
    assert await rig.slot.outcome() == "returned"
    rig.slot.engine = rig.engine
    rig.slot.may_enter.set()
    side = await soon(rig.engine.accept())
    assert (await soon(side.read_request()))[1] == body
    await side.send(whole(b"{}"))
    assert (await client.read_answer()).status == 200
    assert await rig.slot.outcome() == "answered"


def test_a_stream_is_told_behind_all_that_the_engine_wrote() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            # Written and not yet read by the relay, the last event in part.
            await side.send(event("second") + event("third") + event("fourth")[:9])
            rig.slot.leases[0].tell_death()
            assert await client.read_chunk() == b"data: second\n\n"
            assert await client.read_chunk() == b"data: third\n\n"
            assert error_code(await client.read_chunk()) == "engine_died"
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "failed"
            # The engine's end was open all the time.
            await soon(side.wait_closed_by_relay())

    run(scenario())


def test_an_answer_that_was_written_whole_is_an_answer() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(whole(b'{"a":1}'))
            rig.slot.leases[0].tell_death()
            answer = await client.read_answer()
            assert (answer.status, answer.body) == (200, b'{"a":1}')
            assert await rig.slot.outcome() == "answered"

    run(scenario())


def test_a_request_that_the_engine_read_is_told_and_not_sent_again() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            rig.slot.leases[0].tell_death()
            assert (await client.read_answer()).status == 502
            assert await rig.slot.outcome() == "failed"
            assert rig.engine.connections == 1
            side.close()

    run(scenario())


def test_a_slow_reader_gets_what_was_written_and_then_the_error() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            client.pause()
            flood = asyncio.create_task(side.flood())
            await wait_until(lambda: side.is_blocked, 10, "the relay stops reading")
            flood.cancel()
            rig.slot.leases[0].tell_death()
            client.resume()
            chunks = 0
            while len(payload := await soon(client.read_chunk())) > 1000:
                chunks += 1
            assert chunks > 100
            assert error_code(payload) == "engine_died"
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@linux_only
@pytest.mark.parametrize("size", [10, 300_000], ids=["small", "larger than a socket's buffer"])
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "not accepted"])
def test_a_request_that_nobody_read_is_served_by_the_next_engine(size: int, accepted: bool) -> None:
    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            body = json.dumps({"x": "y" * size}).encode()
            client = await hand_over(rig, body)
            if accepted:
                await deaf.accept()
            rig.slot.leases[0].tell_death()
            await serve_next(rig, client, body)

    run(scenario())


@linux_only
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "not accepted"])
def test_so_it_is_where_only_the_end_of_the_connection_tells(accepted: bool) -> None:
    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            client = await hand_over(rig, b'{"x":1}')
            if accepted:
                await deaf.accept()
            deaf.close()
            await serve_next(rig, client, b'{"x":1}')

    run(scenario())


@linux_only
def test_a_request_of_which_the_engine_read_a_part_cannot_have_been_worked_on() -> None:
    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            client = await hand_over(rig, b'{"x":1}')
            side = await deaf.accept()
            assert len(side.recv(10)) == 10
            rig.slot.leases[0].tell_death()
            await serve_next(rig, client, b'{"x":1}')

    run(scenario())


def test_a_request_that_was_read_to_its_last_byte_is_never_sent_again() -> None:
    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            client = await hand_over(rig, b'{"x":1}')
            side = await deaf.accept()
            assert side.recv(1 << 16).endswith(b'{"x":1}')
            rig.slot.leases[0].tell_death()
            assert (await client.read_answer()).status == 502
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@linux_only
def test_engines_that_never_read_fail_the_request_in_the_end() -> None:
    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            client = await rig.connect()
            await client.post(b"{}")
            for _ in range(CONNECT_TRIES_MAX):
                (await soon(deaf.accept())).close()
            assert (await client.read_answer()).status == 502
            outcomes = [await rig.slot.outcome() for _ in range(CONNECT_TRIES_MAX)]
            assert outcomes == ["returned"] * (CONNECT_TRIES_MAX - 1) + ["failed"]

    run(scenario())


@linux_only
def test_no_other_kept_connection_of_an_engine_that_closed_one_unread_is_used() -> None:
    """The kernel closes those of a dead engine one after the other."""

    async def scenario() -> None:
        async with make_rig() as rig:
            (first, kept), (_, used) = await rig.ask(), await rig.ask()
            for side in (kept, used):
                await side.send(whole(b"{}"))
                assert await rig.slot.outcome() == "answered"
                side.pause()
            assert (await first.read_answer()).status == 200
            await first.post(b'{"x":1}')
            await wait_until(lambda: len(rig.slot.leases) == 3, 5, "a place was given")
            await wait_until(lambda: rig.slot.leases[2].is_watched, 5, "the request is out")
            used.reset()
            assert await rig.slot.outcome() == "returned"
            kept.resume()
            await soon(kept.wait_closed_by_relay())
            side = await soon(rig.engine.accept())
            assert (await soon(side.read_request()))[1] == b'{"x":1}'
            await side.send(whole(b"{}"))
            assert (await first.read_answer()).status == 200

    run(scenario())


def test_a_connection_that_ended_before_the_request_was_sent_has_carried_nothing() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(EngineConnection, rig.engine.path)
            (await rig.engine.accept()).close()
            await wait_until(lambda: not connection.is_connected, 5, "the end is known")
            connection.send(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}")
            with pytest.raises(RequestUnread):
                await connection.wait_head()
            connection.close()

    run(scenario())


def test_an_engine_that_closed_before_it_was_written_to_has_read_nothing() -> None:
    """The engine's own idle timeout, in the instant in which the connection is taken again."""

    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            loop = asyncio.get_running_loop()
            path = rig.slot.engine.path
            _, connection = await loop.create_unix_connection(EngineConnection, path)
            (await deaf.accept()).close()
            # No turn of the loop in between: what it knows is that the connection is open.
            assert connection.is_connected and not connection.is_open
            connection.send(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}")
            with pytest.raises(RequestUnread):
                await connection.wait_head()
            connection.close()

    run(scenario())


@linux_only
@pytest.mark.parametrize("is_read", [False, True])
def test_a_death_that_is_known_just_after_the_kernel_closed_says_what_was_read(
    is_read: bool,
) -> None:
    """The end of the process and that of its connections come in one turn of the loop."""

    async def scenario() -> None:
        async with make_rig() as rig, deaf_engine(rig) as deaf:
            loop = asyncio.get_running_loop()
            path = rig.slot.engine.path
            _, connection = await loop.create_unix_connection(EngineConnection, path)
            side = await deaf.accept()
            connection.send(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}")
            if is_read:
                assert side.recv(1 << 16).endswith(b"{}")
            side.close()
            connection.note_death()
            with pytest.raises(EngineGone) as ended:
                await connection.wait_head()
            assert isinstance(ended.value, RequestUnread) is not is_read
            connection.close()

    run(scenario())


class Closing:
    """A transport that the loop has closed, or is about to, with so many bytes not written."""

    def __init__(self, *, unsent: int = 0) -> None:
        self._unsent = unsent

    def write(self, data: bytes) -> None:
        """Take it."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def abort(self) -> None:
        """It is closed."""


def begun(transport: Closing) -> EngineConnection:
    """A connection on which a request has been sent."""
    connection = EngineConnection()
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.send(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}")
    return connection


@linux_only
def test_a_death_that_is_known_between_a_reset_and_its_telling_leaves_that_its_word() -> None:
    async def scenario() -> None:
        connection = begun(Closing())
        connection.note_death()
        connection.connection_lost(ConnectionResetError())
        with pytest.raises(RequestUnread):
            await connection.wait_head()

    run(scenario())


def test_an_end_before_all_of_a_request_was_written_leaves_it_unread() -> None:
    async def scenario() -> None:
        connection = begun(Closing(unsent=2))
        connection.eof_received()
        with pytest.raises(RequestUnread):
            await connection.wait_head()

    run(scenario())
