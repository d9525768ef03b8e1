"""How a request ends when an end goes away: the client, the engine, at each moment."""

import asyncio
import json
from collections.abc import Callable

import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.relay.limits import ANSWER_WHOLE_BYTES_MAX, CONNECT_TRIES_MAX
from mlx_isolate_supervisor.relay.pool import EnginePool
from mlx_isolate_supervisor.relay.upstream import EngineConnection
from tests.integration.relay.rig import (
    END,
    JSON_HEAD,
    SSE_HEAD,
    Client,
    EngineSide,
    Rig,
    ScriptedEngine,
    chunk,
    event,
    make_rig,
    run,
    soon,
    whole,
)
from tests.waiting import wait_until

Leave = Callable[[Client], None]
FIN: Leave = Client.leave
RST: Leave = Client.reset
leaving = pytest.mark.parametrize("leave", [FIN, RST], ids=["fin", "rst"])

Death = Callable[[EngineSide], None]
dying = pytest.mark.parametrize(
    "die", [EngineSide.close, EngineSide.reset], ids=["closed", "reset"]
)


def error_of(payload: bytes) -> dict[str, object]:
    """The error object of one SSE event."""
    assert payload.startswith(b"data: ") and payload.endswith(b"\n\n")
    error: dict[str, object] = json.loads(payload[6:])["error"]
    return error


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
