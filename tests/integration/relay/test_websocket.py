"""WebSockets through the relay, byte by byte: both ways, both ends, and what is told at the end."""

import asyncio
import struct
from collections.abc import Callable

import pytest

from mlx_isolate_shared.errors import EngineError
from mlx_isolate_supervisor.relay.tunnel import CLOSING_S
from tests.fakes.fake_websocket import CLOSE, TEXT, frame, read_frame
from tests.integration.relay.engine_side import EngineSide, whole
from tests.integration.relay.rig import Rig, make_rig, run, soon
from tests.integration.relay.sockets import ACCEPT, ASK, BLOCK, open_socket, read_close
from tests.waiting import wait_until


def test_the_handshake_passes_with_its_headers() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(ASK + b"Sec-WebSocket-Protocol: a, b\r\nCookie: secret\r\n\r\n")
            side = await rig.engine.accept()
            head = await side.read_head()
            assert head.startswith(b"GET /ws?x=1 HTTP/1.1\r\n")
            for line in (b"Upgrade: websocket", b"Sec-WebSocket-Key: a2V5", b"Connection: Upgrade"):
                assert head.count(line) == 1
            assert b"Sec-WebSocket-Protocol: a, b\r\n" in head
            assert b"secret" not in head
            await side.send(ACCEPT[:-2] + b"Sec-WebSocket-Protocol: b\r\n\r\n")
            answer = await client.read_head()
            assert answer.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
            for line in (
                b"Upgrade: websocket",
                b"Connection: Upgrade",
                b"Sec-WebSocket-Accept: YQ==",
                b"Sec-WebSocket-Protocol: b",
                b"x-request-id: ",
            ):
                assert answer.count(line) == 1
            assert b"Content-Length" not in answer and b"Transfer-Encoding" not in answer
            client.reset()

    run(scenario())


def test_bytes_pass_both_ways_also_those_sent_too_early() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(ASK + b"\r\n" + b"early client ")
            side = await rig.engine.accept()
            await side.read_head()
            await client.send(b"late client ")
            await side.send(ACCEPT + frame(TEXT, b"early engine"))
            await client.read_head()
            assert await read_frame(client.reader) == (TEXT, b"early engine")
            await client.send(b"last")
            assert await side.read_exactly(29) == b"early client late client last"
            for number in range(100):
                await side.send(frame(TEXT, str(number).encode()))
                assert await read_frame(client.reader) == (TEXT, str(number).encode())
            assert rig.recorder.running
            (exchange,) = rig.recorder.running.values()
            assert exchange.passing is not None and exchange.passing.events_passed == 101
            assert rig.slot.leases[0].is_upgraded
            client.reset()
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "cancelled"
            (ended,) = rig.recorder.ended_ones
            assert (ended.status, ended.bytes_in, ended.events) == (101, 29, 101)

    run(scenario())


def test_a_refusal_by_the_engine_is_a_plain_answer_on_a_connection_that_goes_on() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(ASK + b"\r\n")
            side = await rig.engine.accept()
            await side.read_head()
            await side.send(whole(b"no", b"HTTP/1.1 404 Not Found\r\n"))
            answer = await client.read_answer()
            assert (answer.status, answer.body) == (404, b"no")
            await client.post(b"{}")
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"https://evil.example", 403),
        (b"null", 403),
        (b"http://localhost.evil.example", 403),
        (b"http://localhost:3000", 101),
        (b"http://localhost", 101),
    ],
)
def test_a_page_of_another_site_opens_no_socket(origin: bytes, status: int) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                ASK + b"Content-Type: application/json\r\nOrigin: " + origin + b"\r\n\r\n"
            )
            if status == 101:
                side = await rig.engine.accept()
                await side.read_head()
                await side.send(ACCEPT)
            head = await soon(client.read_head())
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert rig.engine.connections == (status == 101)
            client.reset()

    run(scenario())


def test_an_upgrade_to_anything_else_is_dropped() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"GET /upstream/m/x HTTP/1.1\r\nHost: localhost\r\n"
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
            )
            side = await rig.engine.accept()
            head = (await side.read_head()).lower()
            assert b"upgrade" not in head and b"http2-settings" not in head
            await side.send(ACCEPT)
            assert (await client.read_answer()).status == 502

    run(scenario())


@pytest.mark.parametrize("die", [EngineSide.close, EngineSide.reset], ids=["closed", "reset"])
def test_a_death_between_frames_is_told_by_a_close_frame(die: Callable[[EngineSide], None]) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            await side.send(frame(TEXT, b"whole"))
            assert await read_frame(client.reader) == (TEXT, b"whole")
            die(side)
            code, reason = await read_close(client)
            assert code == 1011 and "SIGKILL" in reason
            client.leave()
            assert await rig.slot.outcome() == "failed"
            assert rig.recorder.ended_ones[0].code == "engine_died"

    run(scenario())


def test_a_death_is_told_before_the_kernel_has_closed_the_connection() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            await side.send(frame(TEXT, b"last words"))
            rig.slot.leases[0].tell_death()
            assert await read_frame(client.reader) == (TEXT, b"last words")
            code, reason = await read_close(client)
            assert code == 1011 and "SIGKILL" in reason
            client.leave()
            assert await rig.slot.outcome() == "failed"

    run(scenario())


def test_a_death_within_a_frame_ends_the_connection_without_a_word() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            half = BLOCK[:5000]
            await side.send(half)
            assert await client.reader.readexactly(len(half)) == half
            side.reset()
            assert await soon(client.wait_closed()) == b""
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@pytest.mark.parametrize(("code", "close"), [("engine_died", 1012), ("shutting_down", 1001)])
def test_an_engine_that_is_stopped_says_whether_it_comes_back(code: str, close: int) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.reason = EngineError("the engine was stopped", status=502, code=code)
            rig.slot.reason.is_planned = True
            client, side = await open_socket(rig)
            side.close()
            assert await read_close(client) == (close, "the engine was stopped")
            client.leave()
            # Nothing has failed: a stop is how a connection without an end of its own ends.
            assert await rig.slot.outcome() == "cancelled"
            (ended,) = rig.recorder.ended_ones
            assert (ended.outcome, ended.code) == ("cancelled", code)

    run(scenario())


def test_a_close_in_form_passes_and_ends_both_connections() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            await client.send(b"\x88\x80mask")
            assert await side.read_exactly(6) == b"\x88\x80mask"
            await side.send(frame(CLOSE, struct.pack(">H", 4001) + b"done"))
            side.close()
            assert await read_close(client) == (4001, "done")
            # Nothing follows it, whatever the engine's end was.
            assert await soon(client.reader.read(), 5) == b""
            client.leave()
            assert await rig.slot.outcome() == "passed"
            assert rig.recorder.ended_ones[0].outcome == "answered"

    run(scenario())


def test_a_half_closed_client_still_gets_what_the_engine_sends() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            client.writer.write_eof()
            assert await soon(side.read_rest()) == b""
            await side.send(frame(TEXT, b"after the end"))
            assert await read_frame(client.reader) == (TEXT, b"after the end")
            side.close()
            assert await soon(client.wait_closed()) == b""
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


def test_a_client_that_says_no_more_has_left_once_the_engine_is_silent() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            client.leave()
            assert await soon(side.read_rest()) == b""
            # The engine's end is still open, and its place is free again all the same.
            assert await soon(rig.slot.outcome(), 3 * CLOSING_S) == "cancelled"

    run(scenario())


def test_a_shutdown_is_told_by_1001() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            stopping = asyncio.create_task(rig.stop())
            code, reason = await read_close(client)
            assert code == 1001 and "shutting down" in reason
            await soon(side.wait_closed_by_relay())
            client.leave()
            await stopping
            assert rig.recorder.ended_ones[0].code == "shutting_down"

    run(scenario())


def test_a_cancellation_by_the_operator_is_told_by_1008() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            rig.recorder.cancel_all()
            code, reason = await read_close(client)
            assert code == 1008 and "operator" in reason
            await soon(side.wait_closed_by_relay())
            client.leave()
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


def test_who_is_being_told_of_an_end_is_not_told_of_another() -> None:
    """A shutdown ends the engine first, and cuts off what still waits for its client then."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            side.close()
            assert (await read_close(client))[0] == 1011
            rig.recorder.cancel_all()
            assert await soon(client.reader.read()) == b""
            client.leave()
            await soon(rig.recorder.all_ended.wait(), 5)
            (ended,) = rig.recorder.ended_ones
            assert (ended.status, ended.outcome) == (101, "failed")

    run(scenario())


def test_a_hundred_sockets_leave_no_descriptor_behind() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            await open_and_leave(rig)
            before = rig.descriptors()
            for _ in range(100):
                await open_and_leave(rig)
            await wait_until(lambda: rig.descriptors() <= before, 5)

    async def open_and_leave(rig: Rig) -> None:
        client, side = await open_socket(rig)
        client.reset()
        await soon(side.wait_closed_by_relay())
        side.close()
        await rig.slot.outcome()

    run(scenario())
