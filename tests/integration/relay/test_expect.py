"""`Expect`: one 100 at once, no other expectation, one final status."""

import json

import pytest

from tests.integration.relay.client_side import post
from tests.integration.relay.engine_side import whole
from tests.integration.relay.errors_and_bodies import error_of, of_size
from tests.integration.relay.rig import make_rig, run, soon

CHAT = "/v1/chat/completions"


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
