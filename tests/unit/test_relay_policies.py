"""The pure decisions at the edge: origins, hosts, routing fields, error forms."""

import msgspec
import pytest

from mlx_isolate_shared.errors import CapacityError, EngineError, RequestError
from mlx_isolate_supervisor.relay.edge import choose_request_id
from mlx_isolate_supervisor.relay.error_wire import error_body, error_event
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.request_body import BodyBudget, RoutingFields, read_routing

DIED = EngineError("The engine died.", status=502, code="engine_died")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:3000",
        "https://127.0.0.1:8443",
        "http://127.8.9.1",
        "http://[::1]:5173",
        "http://app.localhost:1",
        "tauri://localhost",
    ],
)
def test_loopback_origins_are_allowed_by_default(origin: str) -> None:
    headers = dict(OriginPolicy().answer_headers(origin))
    assert headers["Access-Control-Allow-Origin"] == origin and headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://evil.example#localhost",
        "http://evil.example/localhost",
        "http://[::1",
        "null",
        "",
        "localhost",
    ],
)
def test_foreign_origins_get_no_cors_header(origin: str) -> None:
    assert OriginPolicy().answer_headers(origin) == ()


def test_a_named_origin_is_allowed_and_no_other() -> None:
    policy = OriginPolicy(allowed=("https://chat.example",))
    assert dict(policy.answer_headers("https://chat.example"))["Access-Control-Allow-Origin"]
    assert policy.answer_headers("https://chat.example.evil") == ()
    assert policy.answer_headers("http://localhost") == ()


def test_any_origin_is_a_star_even_without_an_origin() -> None:
    policy = OriginPolicy(allowed=("*",))
    for origin in (None, "https://x.example", "null"):
        assert dict(policy.answer_headers(origin))["Access-Control-Allow-Origin"] == "*"


@pytest.mark.case("48")
def test_without_allowed_origins_cors_is_off() -> None:
    assert OriginPolicy(allowed=()).answer_headers("http://localhost") == ()


def test_a_blind_post_from_a_foreign_page_is_forged_and_a_json_post_is_left_to_the_browser() -> (
    None
):
    policy = OriginPolicy()
    assert policy.is_forged("https://evil.example", "localhost:8080", "text/plain")
    assert policy.is_forged("https://evil.example", "localhost:8080", "")
    assert not policy.is_forged("https://evil.example", "localhost:8080", "application/json; a=b")
    assert not policy.is_forged(None, "localhost:8080", "text/plain")
    assert not policy.is_forged("http://localhost:3000", "localhost:8080", "text/plain")
    assert not policy.is_forged("http://box.example:8080", "box.example:8080", "")


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "[::1]", "LOCALHOST.", None]
    + ["a.localhost:80", "box.example", "box.example:99"],
)
def test_hosts_that_a_loopback_server_answers_for(host: str | None) -> None:
    assert HostPolicy(bound_host="127.0.0.1", allowed=("Box.example",)).allows(host)


@pytest.mark.case("49")
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example:80"]
    + ["", "[::2]:80", "192.168.0.7", "localhost:80@evil.example"],
)
def test_foreign_hosts_are_refused_on_loopback(host: str) -> None:
    assert not HostPolicy(bound_host="127.0.0.1").allows(host)


def test_the_host_check_is_off_on_other_interfaces_and_by_a_star() -> None:
    assert HostPolicy(bound_host="0.0.0.0").allows("box.lan:8080")
    assert HostPolicy(bound_host="127.0.0.1", allowed=("*",)).allows("evil.example")


def test_routing_fields_are_read_and_others_are_left_alone() -> None:
    body = '{"model":"a/b","stream":true,"keep_alive":"5m","ttl":60,"messages":[{"x":{}}]}'
    assert read_routing(body.encode()) == RoutingFields(
        model="a/b", stream=True, keep_alive="5m", ttl=60
    )
    assert read_routing(b'{"model":null,"stream":null}') == RoutingFields()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":5}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":true}', "model"),
        (b'{"stream":"yes"}', "stream"),
        (b'{"stream":1}', "stream"),
        (b'{"keep_alive":{}}', "keep_alive"),
        (b'{"ttl":"x"}', "ttl"),
    ],
)
def test_a_routing_field_of_a_wrong_type_is_named(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_routing(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"[1]", b"5", b'"x"', b"null", b'{"a":NaN}', b"{'a':1}", b'{"a":1}x', b"\xff"]
    + [b"[" * 100_000, b'{"a":' * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_routing(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_the_budget_of_bodies_is_shared_and_given_back() -> None:
    budget = BodyBudget(100)
    with budget.hold() as first, budget.hold() as second:
        first.add(60)
        with pytest.raises(CapacityError) as caught:
            second.add(50)
        assert (caught.value.status, caught.value.headers()) == (429, {"Retry-After": "1"})
        first.release()
        first.release()
        second.add(100)
    assert budget.held == 0


def test_an_error_event_is_one_openai_envelope() -> None:
    assert error_event(DIED, "/v1/chat/completions") == b"data: " + DIED.body() + b"\n\n"


def test_anthropic_gets_an_error_event_in_its_own_form() -> None:
    name, data, *rest = error_event(DIED, "/v1/messages").decode().split("\n")
    assert name == "event: error" and rest == ["", ""]
    value = msgspec.json.decode(data.removeprefix("data: "))
    assert value["type"] == "error" and value["error"]["type"] == "api_error"
    assert msgspec.json.decode(error_body(DIED, "/v1/messages")) == value


def test_a_made_request_id_is_new_each_time() -> None:
    assert choose_request_id("abc") == "abc"
    assert choose_request_id("a b") != choose_request_id("a b")
