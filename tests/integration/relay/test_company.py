"""A streaming client is told what it waits for, and errors are events once it has been."""

import asyncio

import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.relay.limits import RelayLimits
from tests.integration.relay.client_side import Client, post
from tests.integration.relay.engine_side import END, SSE_HEAD, event, whole
from tests.integration.relay.rig import Rig, make_rig, run, soon

QUICK = RelayLimits(loading_look_s=0.05, loading_silence_s=0.2)
STREAM = b'{"stream":true}'


async def waiting(rig: Rig, path: str = "/v1/chat/completions") -> Client:
    """A client that waits and has had its first comment."""
    rig.slot.sends_loading_state = True
    rig.slot.may_enter.clear()
    client = await rig.connect()
    await client.send(post(STREAM, path))
    head = await soon(client.read_head())
    assert b" 200 " in head and b"text/event-stream" in head
    assert await soon(client.read_chunk()) == b": m is loading\n\n"
    return client


def test_a_client_that_waits_is_told_for_what_and_then_gets_its_stream() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig)
            rig.slot.waits_for = "m waits for running requests of n"
            assert b"of n" in await soon(client.read_chunk())
            # Without news it is repeated, so that nobody takes the connection for dead.
            assert b"of n" in await soon(client.read_chunk())
            rig.slot.may_enter.set()
            engine = await soon(rig.engine.accept())
            await engine.read_request()
            await engine.send(SSE_HEAD + event("one") + event("[DONE]") + END)
            rest = b""
            while (piece := await soon(client.read_chunk())) != b"":
                rest += piece
            assert rest.endswith(b"data: one\n\ndata: [DONE]\n\n")
            assert await rig.slot.outcome() == "answered"
            # The connection is good for another request.
            rig.slot.sends_loading_state = False
            await client.send(post(b"{}"))
            engine = await soon(rig.engine.accept()) if engine.writer.is_closing() else engine
            await engine.read_request()
            await engine.send(whole(b'{"a":1}'))
            assert (await soon(client.read_answer())).body == b'{"a":1}'

    run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_refusal_after_a_comment_is_an_event_and_the_end(path: str) -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig, path)
            rig.slot.refusal = CapacityError("no room", status=507, code="memory_budget_exceeded")
            rig.slot.may_enter.set()
            rest = await soon(client.read_end())
            assert rest.count(b"memory_budget_exceeded") == 1 and b"[DONE]" not in rest
            assert (b"event: error" in rest) is (path == "/v1/messages")

    run(main())


def test_a_refusal_before_the_first_comment_is_a_plain_status() -> None:
    async def main() -> None:
        async with make_rig(RelayLimits(loading_look_s=30.0)) as rig:
            rig.slot.sends_loading_state = True
            rig.slot.refusal = CapacityError("full", status=429, code="queue_full")
            client = await rig.connect()
            await client.send(post(STREAM))
            assert (await soon(client.read_answer())).status == 429

    run(main())


def test_an_engines_refusal_after_a_comment_is_an_event_and_the_end() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig)
            rig.slot.may_enter.set()
            engine = await soon(rig.engine.accept())
            await engine.read_request()
            body = b'{"error":{"code":"too_long"}}'
            head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            await engine.send(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            rest = await soon(client.read_end())
            assert b'data: {"error":{"code":"too_long"}}\n\n' in rest and b"[DONE]" not in rest
            assert await rig.slot.outcome() == "rejected"

    run(main())


@pytest.mark.case("30")
def test_comments_do_not_hold_off_the_news_of_a_death() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig)
            rig.slot.may_enter.set()
            engine = await soon(rig.engine.accept())
            await engine.read_request()
            await engine.send(SSE_HEAD + event("one"))
            engine.reset()
            rest = await soon(client.read_end())
            assert b"data: one" in rest and rest.count(b"engine_died") == 1
            assert b"[DONE]" not in rest

    run(main())


def test_without_the_setting_or_a_stream_nothing_is_sent_early() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            for body, is_set in ((STREAM, False), (b"{}", True)):
                rig.slot.sends_loading_state = is_set
                rig.slot.may_enter.clear()
                client = await rig.connect()
                await client.send(post(body))
                with pytest.raises(TimeoutError):
                    await soon(client.read_head(), 0.3)
                client.leave()

    run(main())


def test_a_client_that_leaves_while_it_is_kept_company_leaves_the_queue() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig)
            assert rig.slot.waiting == 1
            client.leave()
            await soon(rig.recorder.all_ended.wait())
            assert rig.slot.waiting == 0
            assert rig.recorder.ended_ones[0].outcome == "cancelled"

    run(main())


def test_a_shutdown_is_told_to_who_is_kept_company() -> None:
    async def main() -> None:
        async with make_rig(QUICK) as rig:
            client = await waiting(rig)
            assert rig.relay is not None
            ending = asyncio.create_task(rig.relay.end_running())
            assert b"shutting_down" in await soon(client.read_end())
            await ending

    run(main())


@pytest.mark.parametrize(
    ("fields", "asked"),
    [(b'"keep_alive":"5m"', 300.0), (b'"ttl":60', 60.0), (b'"keep_alive":0', 0.0)],
)
def test_a_requests_keep_alive_reaches_its_model(fields: bytes, asked: float) -> None:
    async def main() -> None:
        async with make_rig() as rig:
            rig.slot.refusal = CapacityError("full", status=429, code="queue_full")
            client = await rig.connect()
            await client.send(post(b"{%b}" % fields))
            assert (await soon(client.read_answer())).status == 429
            assert rig.slot.kept_alive == [asked]

    run(main())


def test_a_keep_alive_that_is_no_time_is_400_and_names_the_field() -> None:
    async def main() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(post(b'{"keep_alive":"soon"}'))
            answer = await soon(client.read_answer())
            assert answer.status == 400 and b'"param":"keep_alive"' in answer.body

    run(main())
