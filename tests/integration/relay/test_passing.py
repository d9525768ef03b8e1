"""What passes through the relay is what was sent, in both directions."""

import asyncio
import json
import random

import pytest

from mlx_isolate_supervisor.relay.limits import ANSWER_WHOLE_BYTES_MAX
from tests.integration.relay.client_side import post
from tests.integration.relay.engine_side import END, JSON_HEAD, SSE_HEAD, chunk, event, whole
from tests.integration.relay.rig import make_rig, run


def test_a_body_reaches_the_engine_byte_for_byte() -> None:
    body = '{ "model" : "m",\t"x": "ďábel \\u00e9 👩‍👩‍👧‍👦", "model":"m" , "n":1.00e2}\n'.encode()

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(body, "/v1/chat/completions?beta=true&x=%2F%20", b"X-Mine: a,b\r\n")
            side = await rig.engine.accept()
            head, got = await side.read_request()
            assert got == body
            assert head.startswith(b"POST /v1/chat/completions?beta=true&x=%2F%20 HTTP/1.1\r\n")
            assert b"\r\nX-Mine: a,b\r\n" in head
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.case("x8")
@pytest.mark.parametrize(
    ("path", "engine_path"),
    [
        ("/chat/completions", b"/v1/chat/completions"),
        ("/v1/completions", b"/v1/completions"),
        ("/v1/responses", b"/v1/responses"),
        ("/v1/messages", b"/v1/messages"),
        ("/v1/messages/count_tokens?beta=true", b"/v1/messages/count_tokens?beta=true"),
        ("/v1/embeddings", b"/v1/embeddings"),
    ],
)
def test_every_work_endpoint_goes_to_its_own_on_the_engine(path: str, engine_path: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", path)
            side = await rig.engine.accept()
            head, _ = await side.read_request()
            assert head.startswith(b"POST " + engine_path + b" HTTP/1.1\r\n")
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).body == b"{}"

    run(scenario())


def test_the_engine_gets_no_hop_by_hop_header_no_secret_and_one_request_id() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(
                b"{}",
                headers=b"Connection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: 5\r\n"
                b"TE: trailers\r\nAuthorization: Bearer secret\r\nx-api-key: secret\r\n"
                b"Accept-Encoding: gzip\r\nX-Request-Id: mine-1\r\nanthropic-version: 1\r\n",
            )
            side = await rig.engine.accept()
            head, _ = await side.read_request()
            names = [line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line]
            assert sorted(names) == [
                b"anthropic-version",
                b"content-length",
                b"content-type",
                b"host",
                b"x-request-id",
            ]
            assert b"x-request-id: mine-1\r\n" in head
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).one("x-request-id") == "mine-1"

    run(scenario())


@pytest.mark.parametrize("asked", [b"", b"x" * 200, "ďáb".encode(), b"two words"])
def test_an_unusable_request_id_is_replaced(asked: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(headers=b"x-request-id: " + asked + b"\r\n")
            await side.send(whole(b"{}"))
            answer = await client.read_answer()
            assert answer.one("x-request-id").startswith("req-")

    run(scenario())


def test_a_chunked_upload_reaches_the_engine_whole() -> None:
    body = json.dumps({"model": "m", "text": "x" * 300_000}).encode()

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for start in range(0, len(body), 70_001):
                await client.send(chunk(body[start : start + 70_001]))
            await client.send(END)
            side = await rig.engine.accept()
            head, got = await side.read_request()
            assert got == body and b"ransfer-" not in head
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.parametrize(
    "size", [0, 1, 1000, ANSWER_WHOLE_BYTES_MAX, ANSWER_WHOLE_BYTES_MAX + 1, 5 << 20]
)
def test_an_answer_of_known_length_arrives_unchanged(size: int) -> None:
    body = random.Random(size).randbytes(size)
    head = (
        b"HTTP/1.1 201 Made Up\r\nContent-Type: text/strange; charset=x\r\nX-Twice: 1\r\n"
        b"X-Twice: 2\r\nKeep-Alive: timeout=5\r\nServer: inner\r\n"
    )

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(whole(body, head))
            answer = await client.read_answer()
            assert answer.head.startswith(b"HTTP/1.1 201 Made Up\r\n")
            assert answer.body == body
            assert answer.one("content-length") == str(size)
            assert answer.one("content-type") == "text/strange; charset=x"
            assert answer.all("x-twice") == ["1", "2"]
            assert answer.all("keep-alive") == [] and answer.one("server") == "mlx-isolate"
            assert await rig.slot.outcome() == "answered"

    run(scenario())


def test_a_stream_arrives_in_the_engines_own_chunks() -> None:
    texts = ["a", "ď" * 300, "x" * 5000, '{"a":"\\n\\n"}']

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(b'{"stream":true}')
            await side.send(SSE_HEAD)
            head = await client.read_head()
            assert b"Transfer-Encoding: chunked" in head and b"Cache-Control: no-cache" in head
            for text in texts:
                await side.send(event(text))
                assert await client.read_chunk() == f"data: {text}\n\n".encode()
            await side.send(event("[DONE]") + END)
            assert await client.read_chunk() == b"data: [DONE]\n\n"
            assert await client.read_chunk() == b""
            assert await rig.slot.outcome() == "answered"

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_survives_any_split_of_its_bytes(seed: int) -> None:
    rng = random.Random(seed)
    texts = [str(rng.getrandbits(8 * rng.randint(1, 200))) for _ in range(40)]
    wire = SSE_HEAD + b"".join(event(text) for text in texts) + END

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(b'{"stream":true}')
            position = 0
            while position < len(wire):
                step = rng.choice([1, 2, 7, 50, 400])
                await side.send(wire[position : position + step])
                position += step
                await asyncio.sleep(0)
            answer = await client.read_answer()
            assert answer.body == b"".join(f"data: {text}\n\n".encode() for text in texts)
            (exchange,) = rig.recorder.ended_ones
            assert exchange.events == len(texts)

    run(scenario())


def test_a_client_of_http_1_0_gets_the_payload_without_chunks() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
            )
            side = await rig.engine.accept()
            await side.read_request()
            await side.send(SSE_HEAD + event("a") + event("b") + END)
            head = await client.read_head()
            assert b"chunked" not in head
            assert await client.wait_closed() == b"data: a\n\ndata: b\n\n"

    run(scenario())


@pytest.mark.case("31")
def test_one_client_read_brings_one_event() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.open_stream()
            for number in range(50):
                await side.send(event(str(number)))
                assert await client.reader.read(65536) == event(str(number))
            await side.send(END)
            assert await client.read_chunk() == b""

    run(scenario())


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(b"".join(post(b'{"n":%d}' % number) for number in range(5)))
            side = await rig.engine.accept()
            for number in range(5):
                _, body = await side.read_request()
                assert body == b'{"n":%d}' % number
                await side.send(whole(b"[%d]" % number))
            for number in range(5):
                assert (await client.read_answer()).body == b"[%d]" % number
            assert rig.engine.connections == 1

    run(scenario())


def test_an_informational_answer_is_not_passed_on() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Wait\r\n\r\n")
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


def test_a_refusal_by_the_engine_passes_with_its_status() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            await side.send(
                whole(
                    b'{"error":{}}',
                    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n",
                )
            )
            answer = await client.read_answer()
            assert (answer.status, answer.body) == (400, b'{"error":{}}')
            assert await rig.slot.outcome() == "rejected"

    run(scenario())


def test_a_large_json_answer_without_length_is_streamed() -> None:
    parts = [random.Random(number).randbytes(200_000) for number in range(30)]

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            sending = asyncio.create_task(
                side.send(
                    JSON_HEAD
                    + b"Transfer-Encoding: chunked\r\n\r\n"
                    + b"".join(map(chunk, parts))
                    + END
                )
            )
            assert (await client.read_answer()).body == b"".join(parts)
            await sending

    run(scenario())
