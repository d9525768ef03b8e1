"""HTTP's edges: methods, paths, Host names, CORS, faults of ours."""

import pytest
from aiohttp import web

from mlx_isolate_shared.errors import CapacityError, RequestError
from mlx_isolate_supervisor.relay.limits import RelayLimits
from tests.integration.relay.client_side import Answer, Client, post
from tests.integration.relay.engine_side import END, SSE_HEAD, event, whole
from tests.integration.relay.errors_and_bodies import error_of
from tests.integration.relay.rig import make_rig, run

CHAT = "/v1/chat/completions"


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
                    told = error_of(answer)
                    assert told["code"] == "method_not_allowed"
                    assert str(told["message"]).endswith("; use POST.")
                assert answer.status == 405 and "POST" in answer.one("allow")
            assert rig.engine.connections == 0

    run(scenario())


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/nowhere", ""),
        ("/v1/chat/completions/", ""),
        ("/v1/v1/messages", "; leave /v1 off the client's base URL"),
        ("/api/chat", "; Ollama's API is not spoken here, OpenAI's is, under /v1"),
        ("/responses", "; it is at /v1/responses: the client's base URL lacks /v1"),
    ],
)
def test_an_unknown_path_is_a_json_404(path: str, remedy: str) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client = await rig.connect()
            await client.post(b"{}", path)
            answer = await client.read_answer()
            assert answer.status == 404 and error_of(answer)["code"] == "not_found"
            assert error_of(answer)["message"] == f"There is no endpoint {path}{remedy}."

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
