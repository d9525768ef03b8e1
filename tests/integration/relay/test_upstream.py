"""Requests below /upstream/{model}: any method and path, straight to one engine."""

import asyncio
import json

import pytest

from mlx_isolate_shared.errors import CapacityError
from tests.integration.relay.engine_side import END, JSON_HEAD, SSE_HEAD, event, whole
from tests.integration.relay.fake_slot import FakeSlot
from tests.integration.relay.rig import make_rig, run, soon
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("method", "body"), [("PUT", b"\x00\xff not JSON"), ("DELETE", b""), ("PATCH", b"{}")]
)
def test_any_method_path_and_body_reach_the_engine_as_they_are(method: str, body: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            target = "/a%20b//c/%2e%2e/d?x=1&y=%2F+z"
            await client.send(
                f"{method} /upstream/m{target} HTTP/1.1\r\nHost: localhost\r\nX-Own: yes\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            side = await rig.engine.accept()
            head, got = await side.read_request()
            assert head.startswith(f"{method} {target} HTTP/1.1\r\n".encode())
            assert b"\r\nX-Own: yes\r\n" in head
            assert got == body
            await side.send(whole(b'{"ok":1}'))
            answer = await client.read_answer()
            assert (answer.status, answer.body) == (200, b'{"ok":1}')
            assert await rig.slot.outcome() == "passed"

    run(scenario())


def test_a_get_has_no_length_and_its_stream_passes() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(b"GET /upstream/m/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            side = await rig.engine.accept()
            assert b"content-length" not in (await side.read_head()).lower()
            await side.send(SSE_HEAD + event("one"))
            await client.read_head()
            assert await client.read_chunk() == b"data: one\n\n"
            await side.send(END)
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "passed"

    run(scenario())


@pytest.mark.parametrize(
    "head",
    [
        JSON_HEAD + b"Content-Length: 123\r\n\r\n",
        JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        JSON_HEAD + b"\r\n",
    ],
    ids=["length", "chunked", "neither"],
)
def test_a_head_request_gets_the_head_alone_and_keeps_its_connection(head: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            side = None
            for _ in range(2):
                await client.send(b"HEAD /upstream/m/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
                side = side or await rig.engine.accept()
                assert (await side.read_head()).startswith(b"HEAD /x HTTP/1.1\r\n")
                await side.send(head)
                got = await client.read_head()
                assert got.startswith(b"HTTP/1.1 200 OK\r\n")
                assert (b"Content-Length: 123" in got) is (b"123" in head)
                await rig.slot.outcome()

    run(scenario())


def test_a_completion_counts_as_one_on_this_way_too() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", "/upstream/m/v1/chat/completions")
            side = await rig.engine.accept()
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            assert await rig.slot.outcome() == "answered"

    run(scenario())


def test_an_unknown_model_is_404_before_the_body_is_read() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"POST /upstream/org/nobody/x HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 1000\r\n\r\n"
            )
            answer = await soon(client.read_answer())
            assert answer.status == 404
            error = json.loads(answer.body)["error"]
            assert error["code"] == "model_not_found"
            assert "org/nobody" in error["message"]
            assert rig.engine.connections == 0

    run(scenario())


def test_a_death_is_told_in_the_form_of_the_path_on_the_engine() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", "/upstream/m/v1/messages")
            side = await rig.engine.accept()
            await side.read_request()
            side.reset()
            answer = await client.read_answer()
            assert answer.status == 502
            assert json.loads(answer.body)["type"] == "error"

    run(scenario())


def test_a_client_that_leaves_is_cancelled_at_the_engine() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(b"GET /upstream/m/slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            side = await rig.engine.accept()
            await side.read_head()
            client.reset()
            await soon(side.wait_closed_by_relay())
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


def test_a_request_waits_for_its_model_as_any_other() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.may_enter.clear()
            client = await rig.connect()
            await client.send(b"GET /upstream/m/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await wait_until(lambda: rig.slot.waiting, 2)
            assert rig.engine.connections == 0
            rig.slot.may_enter.set()
            side = await asyncio.wait_for(rig.engine.accept(), 2)
            await side.read_head()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


def test_a_model_that_was_replaced_during_an_upload_gets_it() -> None:
    """As a removal and an addition do: the slot that was there when the head came has gone."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"PUT /upstream/m/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\nhalf"
            )
            running = rig.recorder.running
            await wait_until(lambda: any(one.model_id for one in running.values()), 5)
            rig.slot.refusal = CapacityError("m was removed.", status=503, code="model_removed")
            rig.router.slot = later = FakeSlot("m", rig.engine)
            await client.send(b" and")
            side = await rig.engine.accept()
            assert (await side.read_request())[1] == b"half and"
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            assert await later.outcome() == "passed"

    run(scenario())
