"""HTTP's edges: methods, Expect, sizes, encodings, CORS, Host names, broken and slow clients."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web

from mlx_isolate_shared.errors import CapacityError, RequestError
from mlx_isolate_supervisor.relay.limits import MIB, RelayLimits
from tests.integration.relay.rig import (
    END,
    SSE_HEAD,
    Answer,
    Client,
    chunk,
    event,
    make_rig,
    post,
    run,
    soon,
    whole,
)

CHAT = "/v1/chat/completions"


def error_of(answer: Answer) -> dict[str, object]:
    assert answer.one("content-type").startswith("application/json")
    error: dict[str, object] = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def of_size(size: int) -> bytes:
    """A JSON body of exactly `size` bytes, made of many messages."""
    body = b'{"model":"m","messages":[' + b'{"role":"user","content":"0123456789abcdef"},' * (
        (size - 100) // 45
    )
    return body + b'""' + b" " * (size - len(body) - 4) + b"]}"


@pytest.mark.case("49")
@pytest.mark.parametrize(
    ("model", "status"),
    [
        ('"nope/nope"', 404),
        ('"../../etc"', 404),
        ('"/etc/passwd"', 404),
        ('""', 404),
        ("5", 400),
        ("[]", 400),
    ],
)
def test_a_model_that_is_not_served_is_refused_before_any_engine(model: str, status: int) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b'{"model":%b}' % model.encode())
            answer = await client.read_answer()
            assert answer.status == status and error_of(answer)["param"] == "model"
            if status == 404:
                assert error_of(answer)["code"] == "model_not_found"
            assert rig.slot.leases == [] and rig.engine.connections == 0
            assert rig.recorder.ended_ones[0].outcome == "rejected"

    run(scenario())


@pytest.mark.case("49")
@pytest.mark.parametrize("body", [b"{}", b'{"model":null}'])
def test_a_request_without_a_model_goes_to_the_first(body: bytes) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(body)
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.case("49")
@pytest.mark.parametrize("host", [b"evil.example", b"evil.example:8080", b"127.0.0.1.evil.example"])
def test_a_foreign_host_is_refused(host: bytes) -> None:
    """DNS rebinding."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(post(b"{}").replace(b"localhost", host))
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (403, "host_not_allowed")
            assert rig.engine.connections == 0

    run(scenario())


def test_two_host_headers_are_refused() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(post(b"{}", headers=b"Host: localhost\r\n"))
            assert (await client.read_answer()).status == 400

    run(scenario())


def test_a_blind_post_of_a_foreign_page_is_refused() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            request = post(b"{}", headers=b"Origin: https://evil.example\r\n")
            await client.send(request.replace(b"application/json", b"text/plain"))
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (403, "origin_not_allowed")
            assert answer.all("access-control-allow-origin") == []

    run(scenario())


@pytest.mark.case("48")
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method_is_405_and_names_the_right_one(method: str) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            for _ in range(2):
                await client.send(f"{method} {CHAT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                if method == "HEAD":
                    answer = Answer(await client.read_head(), b"")
                else:
                    answer = await client.read_answer()
                    assert error_of(answer)["code"] == "method_not_allowed"
                assert answer.status == 405 and "POST" in answer.one("allow")
            assert rig.engine.connections == 0

    run(scenario())


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/chat/completions/", 404)])
def test_an_unknown_path_is_a_json_404(path: str, status: int) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", path)
            answer = await client.read_answer()
            assert answer.status == status and error_of(answer)["code"] == "not_found"

    run(scenario())


def test_options_without_a_preflight_names_the_methods() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(f"OPTIONS {CHAT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = await client.read_answer()
            assert answer.status == 204 and answer.one("allow") == "OPTIONS, POST"

    run(scenario())


ASKED = "authorization,content-type,x-stainless-os"


async def preflight(client: Client, origin: str) -> Answer:
    await client.send(
        f"OPTIONS {CHAT} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n"
        f"Access-Control-Request-Method: POST\r\n"
        f"Access-Control-Request-Private-Network: true\r\n"
        f"Access-Control-Request-Headers: {ASKED}\r\n\r\n".encode()
    )
    return await client.read_answer()


@pytest.mark.case("48")
@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        (("loopback",), "http://localhost:3000", "http://localhost:3000"),
        (("https://chat.example",), "https://chat.example", "https://chat.example"),
        (("*",), "https://any.example", "*"),
    ],
)
def test_an_allowed_preflight_reflects_the_asked_headers(
    allowed: tuple[str, ...], origin: str, expected: str
) -> None:
    async def scenario() -> None:
        async with make_rig(origins=allowed) as rig:
            answer = await preflight(await rig.connect(), origin)
            assert answer.status == 204
            assert answer.one("access-control-allow-origin") == expected
            assert answer.one("access-control-allow-headers") == ASKED
            assert "POST" in answer.one("access-control-allow-methods")
            assert answer.one("access-control-allow-private-network") == "true"
            assert rig.engine.connections == 0

    run(scenario())


@pytest.mark.case("48")
@pytest.mark.parametrize("allowed", [("loopback",), ()])
def test_a_preflight_that_is_not_allowed_gets_no_cors_header(allowed: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with make_rig(origins=allowed) as rig:
            answer = await preflight(await rig.connect(), "https://evil.example")
            assert answer.status == 403
            assert not any(name.startswith("access-control-") for name, _ in answer.headers)

    run(scenario())


@pytest.mark.case("48")
@pytest.mark.parametrize("allowed", [("loopback",), ()], ids=["on", "off"])
@pytest.mark.parametrize("kind", ["stream", "plain", "400", "404", "503", "405", "path", "413"])
def test_every_answer_carries_exactly_one_allowed_origin_or_none(
    kind: str, allowed: tuple[str, ...]
) -> None:
    """The engine's own CORS headers must not double ours."""
    origin = b"Origin: http://localhost:3000\r\n"

    async def scenario() -> None:
        async with make_rig(RelayLimits(body_bytes_max=1000), origins=allowed) as rig:
            client = await rig.connect()
            if kind == "503":
                rig.slot.refusal = CapacityError("Not now.", status=503, code="not_ready")
            body = {
                "400": b"{",
                "404": b'{"model":"x"}',
                "413": b" " * 1001,
                "stream": b'{"stream":true}',
            }.get(kind, b"{}")
            path = "/nowhere" if kind == "path" else CHAT
            request = post(body, path, origin)
            await client.send(request.replace(b"POST", b"PUT") if kind == "405" else request)
            theirs = b"Access-Control-Allow-Origin: *\r\n"
            if kind in ("plain", "stream"):
                side = await rig.engine.accept()
                await side.read_request()
                head = SSE_HEAD.replace(b"Cache-Control", theirs + b"Cache-Control")
                stream = head + event("x") + END
                plain = whole(b"{}", b"HTTP/1.1 200 OK\r\n" + theirs)
                await side.send(plain if kind == "plain" else stream)
            answer = await client.read_answer()
            expected = ["http://localhost:3000"] if allowed else []
            assert answer.all("access-control-allow-origin") == expected
            assert len(answer.all("x-request-id")) == 1

    run(scenario())


@pytest.mark.case("46")
@pytest.mark.parametrize("size", [10_000, 3_000_000])
def test_a_client_that_expects_100_gets_it_once_and_at_once(size: int) -> None:
    body = of_size(size)

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            request = post(body, headers=b"Expect: 100-continue\r\n")
            await client.send(request[: -len(body)])
            assert await soon(client.read_head(), 0.5) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(body)
            side = await rig.engine.accept()
            head, got = await side.read_request()
            assert got == body and b"xpect" not in head
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200
            await client.post(b"{}")
            await side.read_request()
            await side.send(whole(b"{}"))
            assert (await client.read_answer()).status == 200

    run(scenario())


@pytest.mark.case("46")
def test_an_unknown_model_is_one_final_status_after_the_100() -> None:
    """The model is named in the body, so the body is asked for."""

    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            body = b'{"model":"nope"}'
            await client.send(post(body, headers=b"Expect: 100-continue\r\n")[: -len(body)])
            assert b" 100 " in await client.read_head()
            await client.send(body)
            assert (await client.read_answer()).status == 404
            await client.post(body)
            assert (await client.read_answer()).status == 404

    run(scenario())


@pytest.mark.case("46")
def test_a_body_over_the_limit_is_refused_without_asking_for_it() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
            )
            answer = await soon(client.read_answer(), 0.5)
            assert (answer.status, error_of(answer)["code"]) == (413, "body_too_large")
            assert answer.one("connection") == "close"

    run(scenario())


@pytest.mark.case("46")
def test_an_unknown_expectation_is_417() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.send(post(b"{}", headers=b"Expect: foo\r\n"))
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (417, "expectation_failed")
            assert rig.engine.connections == 0

    run(scenario())


@pytest.mark.case("46")
@pytest.mark.parametrize("value", [b"foo", b"f\xff\xe9"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/upstream/m/v1/messages", "/nowhere"])
def test_an_unknown_expectation_is_told_in_the_form_of_any_other_error(
    path: str, value: bytes
) -> None:
    async def scenario() -> None:
        async with make_rig(origins=("http://localhost:3000",)) as rig:
            client = await rig.connect()
            headers = b"X-Request-Id: mine\r\nOrigin: http://localhost:3000\r\nExpect: "
            headers += value + b"\r\n"
            await client.send(post(b"", path, headers))
            answer = await client.read_answer()
            assert answer.status == 417
            assert ("type" in json.loads(answer.body)) == ("messages" in path)
            assert error_of(answer)["message"]
            assert answer.one("x-request-id") == "mine"
            assert answer.one("access-control-allow-origin") == "http://localhost:3000"
            await client.post(b"{", path=CHAT)
            assert (await client.read_answer()).status == 400

    run(scenario())


def test_a_fault_before_any_handler_is_a_json_500(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: web.Request) -> None:
        raise ValueError("a secret")

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    def extra(app: web.Application) -> None:
        app.router.add_get("/faulty", answer, expect_handler=fail)

    async def scenario() -> None:
        async with make_rig(extra=extra) as rig:
            client = await rig.connect()
            await client.send(
                b"GET /faulty HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n"
            )
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (500, "internal_error")
            assert b"secret" not in answer.body

    run(scenario())
    assert "request.fault" in caplog.text


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
            assert rig.relay is not None and rig.relay.body_bytes_held == 0

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


def test_a_fault_of_ours_is_a_bare_500() -> None:
    def extra(app: web.Application) -> None:
        async def fault(_: web.Request) -> web.Response:
            raise KeyError("/secret/path")

        async def refuse(_: web.Request) -> web.Response:
            raise RequestError("No.", status=418, code="teapot")

        app.router.add_get("/fault", fault)
        app.router.add_get("/refuse", refuse)

    async def scenario() -> None:
        async with make_rig(extra=extra) as rig:
            client = await rig.connect()
            await client.send(b"GET /fault HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await client.read_answer()
            assert (answer.status, error_of(answer)["code"]) == (500, "internal_error")
            assert b"secret" not in answer.body and b"KeyError" not in answer.body
            await client.send(b"GET /refuse HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.read_answer()).status == 418

    run(scenario())
