"""Hostile request bodies end as request errors, whatever they hold."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_engine.protocols import anthropic, chat, completions
from mlx_isolate_engine.protocols.contract import Parse
from mlx_isolate_engine.protocols.json_body import decode_body, filter_fields
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_shared.errors import RequestError
from tests.fakes.scripted_service import CALL
from tests.material.request_bodies import bodies


class Shape(msgspec.Struct):
    text: str | None = None
    count: int | None = None


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_body(body, Shape)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} x",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b"\xef\xbb\xbf{}",
        b'{"text":"\xff"}',
        b'{"text":"\\ud800"}',
        b'{"text":"\\ud800\\u0041"}',
        b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"text":' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    error = refused(body)
    assert error.status == 400
    assert "Struct" not in error.message


def test_number_that_is_not_finite_names_its_field() -> None:
    assert refused(b'{"count": NaN}').param == "count"
    assert refused(b'{"count":-Infinity}').param == "count"


def test_last_of_duplicate_keys_counts() -> None:
    assert decode_body(b'{"count":1,"count":2}', Shape).count == 2


def test_configured_fields_are_dropped_and_replaced() -> None:
    body = filter_fields(b'{"a":1,"b":[1, 2],"c":3}', ["a", "missing"], {"c": 4, "d": 5})
    assert json.loads(body) == {"b": [1, 2], "c": 4, "d": 5}
    assert filter_fields(b"not read", [], {}) == b"not read"


PARSERS: dict[str, Parse] = {
    "/v1/chat/completions": chat.parse,
    "/v1/completions": completions.parse,
    "/v1/messages": anthropic.parse,
    "/v1/responses": ResponsesProtocol(ResponseStore()).parse,
}


@pytest.mark.parametrize("path", PARSERS)
@given(data=st.data())
def test_parser_raises_nothing_but_request_errors(path: str, data: st.DataObject) -> None:
    try:
        request = PARSERS[path](data.draw(bodies(path)), CALL)
    except RequestError as error:
        assert 400 <= error.status < 500
        assert msgspec.json.decode(error.body())
    else:
        assert request.completions


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    for parse in PARSERS.values():
        with pytest.raises(RequestError):
            parse(body, CALL)
