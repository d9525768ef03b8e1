"""Bodies and heads at their limits: sizes, encodings, what is no HTTP, what stops arriving."""

import asyncio
import gzip

import pytest

from mlx_isolate_supervisor.relay.limits import MIB, RelayLimits
from tests.integration.relay.client_side import Client, post
from tests.integration.relay.engine_side import END, SSE_HEAD, chunk, event, whole
from tests.integration.relay.errors_and_bodies import error_of, of_size
from tests.integration.relay.rig import make_rig, run, soon

CHAT = "/v1/chat/completions"


@pytest.mark.case("47")
@pytest.mark.parametrize("size", [1_153_433, 8 * MIB, 64 * MIB])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_large_bodies_up_to_the_limit_are_taken(size: int, is_chunked: bool) -> None:
    body = of_size(size)
    assert len(body) == size

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            sending = asyncio.create_task(send_body(client, body, is_chunked))
            side = await rig.engine.accept()
            _, got = await side.read_request()
            assert got == body
            await sending
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            assert rig.body_bytes_held == 0

    run(scenario())


@pytest.mark.case("47")
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_one_byte_over_the_limit_is_413(is_chunked: bool) -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(body_bytes_max=2 * MIB)) as rig:
            body = of_size(2 * MIB)
            client = await rig.connect()
            await send_body(client, body, is_chunked)
            side = await rig.engine.accept()
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            await send_body(client, body + b" ", is_chunked)
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (413, "body_too_large")

    run(scenario())


async def send_body(client: Client, body: bytes, is_chunked: bool) -> None:
    if not is_chunked:
        await client.post(body)
        return
    await client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for start in range(0, len(body), MIB):
        await client.send(chunk(body[start : start + MIB]))
    await client.send(END)


@pytest.mark.case("47")
@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd"])
def test_a_compressed_body_is_415_and_is_never_unpacked(coding: bytes) -> None:
    """A gigabyte of zeros in a megabyte."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            body = gzip.compress(bytes(1 << 24))
            await client.post(body, headers=b"Content-Encoding: " + coding + b"\r\n")
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (415, "unsupported_encoding")
            assert rig.recorder.ended_ones[0].bytes_in == 0

    run(scenario())


@pytest.mark.case("47")
def test_an_asked_for_compression_never_reaches_the_engine() -> None:
    """Compression would hold back events."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", headers=b"Accept-Encoding: gzip, br\r\n")
            side = await rig.engine.accept()
            head, _ = await side.read_request()
            assert b"gzip" not in head
            await side.send(SSE_HEAD + event("x"))
            assert b"ontent-Encoding" not in await client.read_head()
            assert await client.read_chunk() == b"data: x\n\n"
            await side.send(END)

    run(scenario())


@pytest.mark.case("47")
def test_bodies_of_all_requests_together_are_bounded() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(bodies_bytes_max=3 * MIB)) as rig:
            first, side = await rig.ask(of_size(2 * MIB))
            second = await rig.connect()
            await second.post(of_size(2 * MIB))
            answer = await second.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (429, "queue_full")
            await side.send(whole(b"{}"))
            await first.read_answer()
            third = await rig.connect()
            await third.post(of_size(2 * MIB))
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await third.read_answer()).status == 200

    run(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"y" * 40_000 + b"\r\n",
        b"".join(b"X%d: %b\r\n" % (n, b"y" * 400) for n in range(100)),
        b"".join(b"X%d: y\r\n" % n for n in range(200)),
    ],
    ids=["one", "many", "small"],
)
def test_headers_over_the_limit_are_431(headers: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", headers=headers)
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (431, "headers_too_large")

    run(scenario())


def test_headers_under_the_limit_are_taken() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(headers=b"X: " + b"y" * 30_000 + b"\r\n")
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"zz\r\n\r\n"
        ),
    ],
    ids=["tls", "nonsense", "negative length", "two framings", "bad chunk"],
)
def test_what_is_no_http_is_a_json_400_and_a_closed_connection(request_bytes: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(request_bytes)
            answer = await soon(client.read_answer())
            assert answer.status == 400 and error_of(answer)["code"] == "bad_http"
            assert "Traceback" not in answer.body.decode()
            # What the server is made of is nobody's business.
            assert answer.all("server") == ["mlx-isolate"]
            assert rig.engine.connections == 0

    run(scenario())


def test_a_body_that_stops_arriving_is_408() -> None:
    async def scenario() -> None:
        limits = RelayLimits(body_idle_s=0.1)  # the real one takes half a minute
        async with make_rig(limits) as rig:
            client = await rig.connect()
            await client.send(post(b"x" * 100)[:-50])
            answer = await soon(client.read_answer())
            assert (answer.status, error_of(answer)["code"]) == (408, "body_timeout")
            assert answer.one("connection") == "close"

    run(scenario())


def test_a_body_that_trickles_is_408_in_the_end() -> None:
    async def scenario() -> None:
        limits = RelayLimits(body_idle_s=0.2, body_total_s=0.4)
        async with make_rig(limits) as rig:
            client = await rig.connect()
            await client.send(post(b"x" * 1000)[:-1000])
            reading = asyncio.create_task(client.read_answer())
            while not reading.done():
                await client.send(b"x")
                await asyncio.wait([reading], timeout=0.02)
            assert reading.result().status == 408

    run(scenario())


def test_a_head_that_trickles_is_cut_off() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(keep_alive_s=0.2)) as rig:
            client = await rig.connect()
            closed = asyncio.create_task(client.wait_closed())
            await client.send(b"POST /v1/completions HTTP/1.1\r\n")
            while not closed.done():
                client.writer.write(b"X: y\r\n")
                await asyncio.wait([closed], timeout=0.02)

    run(scenario())
