"""What a client is told when its request ends otherwise: a death, nonsense, a refusal, a stop."""

import asyncio
import json
from collections.abc import Callable

import pytest

from mlx_isolate_shared.errors import CapacityError
from tests.integration.relay.engine_side import (
    END,
    JSON_HEAD,
    SSE_HEAD,
    EngineSide,
    chunk,
    event,
    whole,
)
from tests.integration.relay.rig import make_rig, run, soon
from tests.waiting import wait_until

Death = Callable[[EngineSide], None]
dying = pytest.mark.parametrize(
    "die", [EngineSide.close, EngineSide.reset], ids=["closed", "reset"]
)


def error_of(payload: bytes) -> dict[str, object]:
    """The error object of one SSE event."""
    assert payload.startswith(b"data: ") and payload.endswith(b"\n\n")
    error: dict[str, object] = json.loads(payload[6:])["error"]
    return error


@pytest.mark.case("02")
@dying
@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-"], ids=["nothing", "half head"]
)
def test_a_death_before_the_headers_is_a_502_on_a_connection_that_stays(
    die: Death, sent: bytes
) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(b'{"stream":true}')
            await side.send(sent)
            die(side)
            answer = await soon(client.read_answer())
            assert (answer.status, answer.one("retry-after")) == (502, "1")
            assert json.loads(answer.body)["error"]["code"] == "engine_died"
            assert await rig.slot.outcome() == "failed"
            await client.post(b"{}")
            side = await rig.engine.accept()
            await side.read_request()
            await side.send(whole(b"[1]"))
            assert (await client.read_answer()).body == b"[1]"

    run(scenario())


@dying
def test_a_death_in_the_middle_of_a_plain_answer_is_still_a_502(die: Death) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(JSON_HEAD + b"Content-Length: 100\r\n\r\n12345")
            die(side)
            answer = await soon(client.read_answer())
            assert answer.status == 502
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@pytest.mark.case("02")
@dying
@pytest.mark.parametrize("cut", [0, 1, 3, 5, 20, -1])
def test_a_death_in_a_stream_is_one_error_event_behind_the_last_whole_event(
    die: Death, cut: int
) -> None:
    partial = event("never seen")[:cut]

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            await side.send(event("second") + partial)
            assert await client.read_chunk() == b"data: second\n\n"
            die(side)
            assert error_of(await soon(client.read_chunk())) == {
                "message": "The engine died (SIGKILL).",
                "type": "server_error",
                "param": None,
                "code": "engine_died",
            }
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "failed"
            (exchange,) = rig.recorder.ended_ones
            assert (exchange.status, exchange.code) == (200, "engine_died")

    run(scenario())


def test_the_connection_stays_usable_behind_an_error_event() -> None:
    """A client that tries again at once does so on the connection that it just read from."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            side.reset()
            await soon(client.read_end())
            await client.post(b"{}")
            again = await soon(rig.engine.accept())
            await again.read_request()
            await again.send(whole(b"{}"))
            assert (await soon(client.read_answer())).status == 200

    run(scenario())


def test_an_event_that_came_over_two_chunks_is_dropped_when_the_second_never_comes() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            await side.send(chunk(b"data: half"))
            side.reset()
            error_of(await soon(client.read_chunk()))
            assert await soon(client.read_end()) == END

    run(scenario())


def test_a_death_between_head_and_first_event_is_an_error_event() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(b'{"stream":true}')
            await side.send(SSE_HEAD)
            await client.read_head()
            side.reset()
            assert error_of(await client.read_chunk())["code"] == "engine_died"

    run(scenario())


def test_anthropics_stream_ends_in_its_own_error_event() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b'{"stream":true}', "/v1/messages")
            side = await rig.engine.accept()
            await side.read_request()
            await side.send(SSE_HEAD + chunk(b"event: ping\ndata: {}\n\n"))
            await client.read_head()
            await client.read_chunk()
            side.reset()
            name, data, _, _ = (await client.read_chunk()).split(b"\n")
            assert name == b"event: error"
            assert json.loads(data[6:])["error"]["type"] == "api_error"
            assert await soon(client.read_end()) == END

    run(scenario())


def test_a_stream_that_was_whole_is_no_failure_when_the_engine_dies_after_it() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            await side.send(event("[DONE]") + END)
            side.reset()
            assert await client.read_chunk() == b"data: [DONE]\n\n"
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "answered"

    run(scenario())


@pytest.mark.parametrize("length", [b"Content-Length: 3000000", b"Transfer-Encoding: chunked"])
def test_a_large_plain_answer_that_is_torn_never_looks_whole(length: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(JSON_HEAD + length + b"\r\n\r\n" + chunk(b"x" * 100_000))
            await client.read_head()
            side.reset()
            rest = await soon(client.wait_closed())
            assert len(rest) < 110_000 and not rest.endswith(END)
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ],
)
def test_an_engine_that_does_not_speak_http_is_a_502_and_is_left(answer: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(answer)
            got = await client.read_answer()
            assert got.status == 502
            assert json.loads(got.body)["error"]["code"] == "engine_bad_answer"
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "failed"

    run(scenario())


@pytest.mark.parametrize("bad", [b"-5\r\nxxx", b"fffffffffffffff\r\n", b"2\r\nabc\r\n", b"zz\r\n"])
def test_wrong_framing_in_a_stream_ends_it_with_an_error_event(bad: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            await side.send(event("last") + bad)
            rest = await soon(client.read_end())
            assert b"engine_bad_answer" in rest and b"[DONE]" not in rest
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "failed"

    run(scenario())


def test_a_refused_admission_is_told_and_frees_the_connection() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.refusal = CapacityError(
                "Too many requests wait.", status=429, code="queue_full", retry_after_s=2.0
            )
            client = await rig.connect()
            for _ in range(2):
                await client.post(b"{}")
                answer = await client.read_answer()
                assert (answer.status, answer.one("retry-after")) == (429, "2")
            assert [e.outcome for e in rig.recorder.ended_ones] == ["rejected", "rejected"]

    run(scenario())


@dying
def test_an_engine_that_refuses_and_closes_during_the_upload_has_its_answer_passed(
    die: Death,
) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b'{"x":"' + b"y" * 3_000_000 + b'"}')
            side = await rig.engine.accept()
            await side.read_head()
            await side.send(whole(b"[413]", b"HTTP/1.1 413 Too Large\r\nConnection: close\r\n"))
            assert (await client.read_answer()).status == 413
            die(side)
            assert await rig.slot.outcome() == "rejected"

    run(scenario())


@pytest.mark.parametrize("phase", ["queued", "waiting", "streaming"])
def test_an_operators_cancel_is_told_to_the_client(phase: str) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            if phase == "queued":
                rig.slot.may_enter.clear()
                client = await rig.connect()
                await client.post(b"{}")
                await wait_until(lambda: rig.slot.waiting, 2)
            elif phase == "waiting":
                client, _ = await rig.ask()
            else:
                client, _ = await rig.open_stream()
            rig.recorder.cancel_all()
            if phase == "streaming":
                assert error_of(await client.read_chunk())["code"] == "request_cancelled"
                assert await soon(client.read_end()) == END
            else:
                answer = await client.read_answer()
                assert json.loads(answer.body)["error"]["code"] == "request_cancelled"
                assert answer.status == 499
            assert rig.recorder.ended_ones[0].outcome == "cancelled"

    run(scenario())


def test_a_stop_of_the_server_is_told_to_a_streaming_client() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, _ = await rig.open_stream()
            reading = asyncio.ensure_future(client.wait_closed())
            await rig.stop()
            assert b'"code":"shutting_down"' in await reading

    run(scenario())
