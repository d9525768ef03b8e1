"""The engine's HTTP server on a real unix socket, in front of scripted completions."""

import asyncio
import gzip
import json
import os
import stat
from typing import Any

import pytest

from mlx_isolate_engine.protocols.json_body import PARTS_MAX
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import CapacityError, EngineError, RequestError
from tests.fakes.scripted_service import Step, content
from tests.integration.server_rig import CHAT, HELLO, STREAM, Served, run
from tests.raw_http import RawClient, ask
from tests.waiting import wait_until


@pytest.mark.parametrize("body", [HELLO, STREAM, {**STREAM, "n": 2}])
def test_refusal_by_prepare_is_a_plain_status(body: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(body)
        assert response.status == 400
        assert response.json["error"]["code"] == "context_length_exceeded"

    refusal = RequestError("Too long.", code="context_length_exceeded")
    run(scenario, refusal=refusal)


def test_queue_full_is_429_with_retry_after() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(HELLO)
        assert response.status == 429
        assert response.headers["retry-after"] == "2"

    run(scenario, refusal=CapacityError("Full.", status=429, code="full", retry_after_s=2))


@pytest.mark.parametrize("body", [HELLO, STREAM, {**STREAM, "n": 2}, {**HELLO, "n": 2}])
def test_failure_before_the_first_event_is_a_plain_status(body: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(body)
        assert response.status == 500
        assert response.json["error"]["code"] == "row_failed"

    run(scenario, [EngineError("Failed.", status=500, code="row_failed")])


@pytest.mark.parametrize("steps", [[], content("a")])
def test_fault_of_ours_says_nothing_of_our_insides(steps: list[Step]) -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat(STREAM)
        error = (response.data[-1] if steps else response.json)["error"]
        assert error["code"] == "internal_error"
        assert b"secret" not in response.body
        assert (await ask(served.path, "/health", method="GET")).status == 200

    run(scenario, [*steps, ValueError("secret")])


def test_stop_cuts_what_is_active_and_refuses_what_is_new() -> None:
    async def scenario(served: Served) -> None:
        async with (
            await RawClient.connect(served.path) as stream,
            await RawClient.connect(served.path) as whole,
            await RawClient.connect(served.path) as late,
        ):
            stream.send(CHAT, STREAM)
            whole.send(CHAT, HELLO)
            await stream.head()
            await wait_until(lambda: served.server.active == 2, 1)
            stopping = asyncio.create_task(served.server.stop(0.2))
            await asyncio.sleep(0)
            late.send(CHAT, HELLO)
            refused = await late.answer()
            assert (refused.status, refused.json["error"]["code"]) == (503, "engine_stopping")
            cut = await whole.answer()
            assert (cut.status, cut.json["error"]["code"]) == (503, "engine_stopping")
            events = [await stream.chunk()]
            while events[-1]:
                events.append(await stream.chunk())
            assert json.loads(events[-2][6:])["error"]["code"] == "engine_stopping"
            await stopping

    run(scenario, [*content("a"), asyncio.Event()])


def test_stop_lets_the_active_finish() -> None:
    finish = asyncio.Event()

    async def scenario(served: Served) -> None:
        asked = asyncio.create_task(served.chat(HELLO))
        await served.service.running.wait()
        stopping = asyncio.create_task(served.server.stop(5))
        await asyncio.sleep(0)
        finish.set()
        assert (await asked).status == 200
        await stopping

    run(scenario, [finish, *content("a")])


@pytest.mark.case("47")
def test_body_over_the_limit_is_413() -> None:
    async def scenario(served: Served) -> None:
        big = {"messages": [{"role": "user", "content": "x" * 2000}]}
        plain = await served.chat(big)
        assert (plain.status, plain.json["error"]["code"]) == (413, "body_too_large")
        packed = gzip.compress(json.dumps(big).encode())
        assert len(packed) < 1000
        unpacked = await served.chat(packed, headers={"Content-Encoding": "gzip"})
        assert unpacked.status == 413

    run(scenario, settings=EngineSettings(body_bytes_max=1000))


@pytest.mark.parametrize(
    "unknown",
    [b"[" + b"[]," * PARTS_MAX + b"[]]", b"{" + b'"a":1,' * PARTS_MAX + b'"b":1}'],
    ids=["lists", "fields"],
)
def test_body_of_too_many_parts_is_refused_before_they_are_built(unknown: bytes) -> None:
    async def scenario(served: Served) -> None:
        messages = json.dumps(HELLO["messages"]).encode()
        response = await served.chat(b'{"x":' + unknown + b',"messages":' + messages + b"}")
        assert response.status == 400
        assert "too many lists" in response.json["error"]["message"]

    run(scenario, content("a"))


def test_compressed_body_is_read_and_a_broken_one_refused() -> None:
    async def scenario(served: Served) -> None:
        headers = {"Content-Encoding": "gzip"}
        packed = gzip.compress(json.dumps(HELLO).encode())
        assert (await served.chat(packed, headers=headers)).status == 200
        broken = await served.chat(b"\x1f\x8b" + b"junk" * 20, headers=headers)
        assert broken.status == 400
        assert "error" in broken.json

    run(scenario, content("a"))


def test_unknown_path_and_method_are_json() -> None:
    async def scenario(served: Served) -> None:
        missing = await ask(served.path, "/v1/nothing", method="GET")
        assert (missing.status, missing.json["error"]["type"]) == (404, "invalid_request_error")
        wrong = await ask(served.path, CHAT, method="GET")
        assert (wrong.status, wrong.headers["allow"]) == (405, "post")
        assert wrong.json["error"]["code"] == "method_not_allowed"

    run(scenario)


@pytest.mark.case("44")
def test_models_are_listed_with_the_context_length() -> None:
    async def scenario(served: Served) -> None:
        models = await ask(served.path, "/v1/models", method="GET")
        (model,) = models.json["data"]
        assert (model["id"], model["context_length"]) == ("m", 4096)
        assert (await ask(served.path, "/v1/models/m", method="GET")).json == model
        assert (await ask(served.path, "/v1/models/a/b", method="GET")).status == 404

    run(scenario)


def test_configured_fields_are_stripped_and_set() -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat({**HELLO, "temperature": "hot", "top_p": 0.1})
        assert response.status == 200
        (request,) = served.service.requests
        assert (request.sampling.temperature, request.sampling.top_p) == (None, 0.5)

    settings = EngineSettings(strip_params=("temperature",), set_params={"top_p": 0.5})
    run(scenario, content("a"), settings)


def test_socket_is_private() -> None:
    async def scenario(served: Served) -> None:
        assert stat.S_IMODE(os.stat(served.path).st_mode) == 0o600

    run(scenario)


def test_connection_is_kept_after_an_answer_and_after_a_refusal() -> None:
    async def scenario(served: Served) -> None:
        async with await RawClient.connect(served.path) as client:
            for body in (HELLO, {}, STREAM, HELLO):
                client.send(CHAT, body)
                response = await client.answer()
                assert response.status == (200 if body else 400)

    run(scenario, content("a"))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations"])
def test_what_the_model_cannot_do_is_said(path: str) -> None:
    async def scenario(served: Served) -> None:
        response = await ask(served.path, path, {"input": "x", "model": "m"})
        assert response.status == 400
        assert "cannot" in response.json["error"]["message"]

    run(scenario)


def test_openapi_document_describes_every_generation_path() -> None:
    async def scenario(served: Served) -> None:
        document = (await ask(served.path, "/openapi.json", method="GET")).json
        assert {CHAT, "/v1/completions", "/v1/messages", "/v1/responses"} <= set(document["paths"])
        text = json.dumps(document)
        assert "#/components/schemas/ChatBody" in text
        assert document["components"]["schemas"]["SamplingBody"]["properties"]["temperature"]

    run(scenario)


@pytest.mark.case("x8")
def test_anthropic_stream_errors_and_count() -> None:
    async def scenario(served: Served) -> None:
        body = {**HELLO, "max_tokens": 5}
        streamed = await ask(served.path, "/v1/messages?beta=true", {**body, "stream": True})
        assert streamed.chunks[0].startswith(b"event: message_start\n")
        assert streamed.chunks[-1].startswith(b"event: message_stop\n")
        assert all(chunk.count(b"data: ") == 1 for chunk in streamed.chunks)
        refused = await ask(served.path, "/v1/messages", {"max_tokens": 5})
        assert refused.json["type"] == "error"
        assert refused.json["error"]["type"] == "invalid_request_error"
        counted = await ask(served.path, "/v1/messages/count_tokens?beta=true", HELLO)
        assert counted.json == {"input_tokens": 7}

    run(scenario, content("a"))


def test_kept_responses_can_be_read_and_forgotten() -> None:
    async def scenario(served: Served) -> None:
        first = (await ask(served.path, "/v1/responses", {"input": "hi"})).json
        path = f"/v1/responses/{first['id']}"
        assert (await ask(served.path, path, method="GET")).json == first
        more = {"input": "more", "previous_response_id": first["id"]}
        assert (await ask(served.path, "/v1/responses", more)).status == 200
        listed = (await ask(served.path, f"{path}/input_items?limit=1", method="GET")).json
        assert [item["content"][0]["text"] for item in listed["data"]] == ["hi"]
        streamed = await ask(served.path, f"{path}?stream=true", method="GET")
        assert (streamed.status, streamed.json["error"]["param"]) == (400, "stream")
        assert (await ask(served.path, path, method="DELETE")).json["deleted"] is True
        assert (await ask(served.path, path, method="GET")).status == 404
        assert (await ask(served.path, f"{path}/input_items", method="GET")).status == 404
        assert (await ask(served.path, "/v1/responses", more)).status == 400

    run(scenario, content("a"))


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "streamed"])
def test_what_is_not_held_is_told_in_a_header(body: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        response = await served.chat({**body, "n": 2})
        assert response.headers["x-mlx-isolate-warning"] == "not held."

    run(scenario, content("a"), notices=("not held.",))
