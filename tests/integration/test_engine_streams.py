"""Streams of the engine's HTTP server: their chunks, their ends, and clients that leave or stall."""

import asyncio
import json
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import PrefillProgress
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError
from tests.fakes.scripted_service import Step, content
from tests.integration.server_rig import CHAT, HELLO, STREAM, Served, run
from tests.raw_http import RawClient, ask
from tests.waiting import wait_until


@pytest.mark.case("31")
def test_every_event_is_one_chunk() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat({**STREAM, "stream_options": {"include_usage": True}})
        assert response.ended
        assert len(response.chunks) == 7
        for chunk in response.chunks:
            assert chunk.startswith(b"data: ")
            assert chunk.endswith(b"\n\n")
            assert chunk.count(b"\n") == 2

    run(scenario, content("a", "b", "c"))


@pytest.mark.case("31")
def test_stream_has_its_headers_and_joins_to_the_whole_answer() -> None:
    async def scenario(served: Served) -> None:
        streamed = await served.chat(STREAM, headers={"x-request-id": "mine"})
        assert streamed.status == 200
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"
        assert streamed.headers["x-request-id"] == "mine"
        assert streamed.chunks[-1] == b"data: [DONE]\n\n"
        whole = await served.chat(HELLO)
        assert whole.headers["content-type"] == "application/json"
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in streamed.data)
        assert text == whole.json["choices"][0]["message"]["content"] == "Grüße 👋"
        assert served.completed == 1

    run(scenario, content("Grüße", " 👋"))


@pytest.mark.case("43")
def test_n_streams_interleave_by_index() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat({**STREAM, "n": 2})
        texts = {0: "", 1: ""}
        for one in response.data:
            (choice,) = one["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "ab", 1: "ab"}

    run(scenario, content("a", "b"))


def test_failure_after_events_is_an_error_event_and_no_done() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(STREAM)
        assert response.status == 200
        assert response.data[-1]["error"]["code"] == "row_failed"
        assert all(one["choices"][0]["finish_reason"] is None for one in response.data[:-1])
        assert b"[DONE]" not in response.body
        assert response.ended

    run(scenario, [*content("a"), EngineError("Failed.", status=500, code="row_failed")])


@pytest.mark.parametrize("body", [HELLO, STREAM, {**STREAM, "n": 3}])
@pytest.mark.parametrize("began", [False, True])
def test_client_that_leaves_cancels_its_completions(body: dict[str, Any], began: bool) -> None:
    async def scenario(served: Served) -> None:
        client = await RawClient.connect(served.path)
        client.send(CHAT, body)
        await served.service.running.wait()
        if began and body.get("stream"):
            await client.head()
            await client.chunk()
        client.close()
        async with asyncio.timeout(1):
            await served.service.was_cancelled.wait()
        await wait_until(lambda: served.service.open == 0, 1)
        await wait_until(lambda: served.server.active == 0, 1)
        assert served.service.cancelled == body.get("n", 1)

    never = asyncio.Event()
    run(scenario, [*(content("a") if began else []), never])


@pytest.mark.case("30")
def test_keepalives_only_after_silence_and_with_progress() -> None:
    go_on = asyncio.Event()

    async def scenario(served: Served) -> None:
        async with await RawClient.connect(served.path) as client:
            client.send(CHAT, STREAM)
            await client.head()
            assert await client.chunk() == b": keepalive 3/7\n\n"
            assert await client.chunk() == b": keepalive 3/7\n\n"
            go_on.set()
            rest = [await client.chunk()]
            while rest[-1]:
                rest.append(await client.chunk())
            assert all(chunk.startswith(b"data: ") for chunk in rest[:-1])
            assert rest[-2] == b"data: [DONE]\n\n"

    steps: list[Step] = [PrefillProgress(done=3, total=7), go_on, *content("a")]
    # A short interval, so that the test need not wait for the real one.
    run(scenario, steps, EngineSettings(sse_ping_interval_s=0.05))


@pytest.mark.case("30")
def test_no_keepalive_within_the_interval() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(STREAM)
        assert b": keepalive" not in response.body

    run(scenario, content("a"))


def test_failure_after_a_keepalive_is_an_event() -> None:
    fail = asyncio.Event()

    async def scenario(served: Served) -> None:
        async with await RawClient.connect(served.path) as client:
            client.send(CHAT, STREAM)
            assert (await client.head()).status == 200
            assert await client.chunk() == b": keepalive 0/7\n\n"
            fail.set()
            event = await client.chunk()
            while event.startswith(b":"):
                event = await client.chunk()
            assert json.loads(event[6:])["error"]["code"] == "row_failed"

    # A short interval, so that the test need not wait for the real one.
    run(
        scenario,
        [fail, EngineError("Failed.", status=500, code="row_failed")],
        EngineSettings(sse_ping_interval_s=0.05),
    )


def test_client_that_does_not_read_holds_back_its_completion_only() -> None:
    text = "x" * 10_000

    async def scenario(served: Served) -> None:
        client = await RawClient.connect(served.path)
        client.send(CHAT, STREAM)
        await client.head()
        await served.service.running.wait()
        assert (await ask(served.path, "/health", method="GET")).status == 200
        assert served.server.active == 1
        client.close()
        await wait_until(lambda: served.server.active == 0, 2)

    run(scenario, content(*[text] * 2000))


@pytest.mark.parametrize("body", [HELLO, STREAM, {**STREAM, "n": 2}])
def test_client_that_never_reads_is_hung_up_on(body: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        async with await RawClient.connect(served.path) as client:
            client.send(CHAT, body)
            await served.service.running.wait()
            await wait_until(lambda: served.server.connections == 0, 5)
            assert served.server.active == served.service.open == 0

    # Short limits, so that the test need not wait for the real ones.
    settings = EngineSettings(stall_timeout_s=0.2)
    run(scenario, content(*["x" * 10_000] * 2000), settings, stall_s=0.2)


def test_stream_that_fails_is_not_kept() -> None:
    async def scenario(served: Served) -> None:
        response = await ask(served.path, "/v1/responses", {"input": "hi", "stream": True})
        response_id = response.data[0]["response"]["id"]
        path = f"/v1/responses/{response_id}"
        assert (await ask(served.path, path, method="GET")).status == 404

    run(scenario, [*content("a"), EngineError("Failed.", status=500, code="row_failed")])
