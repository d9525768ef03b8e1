"""Hostile request bodies end as request errors, whatever they hold."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_engine.protocols import anthropic, chat, completions
from mlx_isolate_engine.protocols.anthropic_request import MessagesBody
from mlx_isolate_engine.protocols.fields import SamplingBody
from mlx_isolate_engine.protocols.json_body import decode_body, filter_fields
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_engine.protocols.responses_request import ResponsesBody
from mlx_isolate_shared.errors import RequestError
from tests.fakes.scripted_service import CALL


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
ROLE = st.sampled_from(["user", "system", "assistant", "tool", "developer", "foo"])
PART = st.fixed_dictionaries({}, optional={"type": JSON | st.just("text"), "text": JSON})
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLE | JSON,
        "content": st.text(max_size=5) | st.lists(PART | JSON, max_size=3) | JSON,
        "tool_calls": JSON,
        "name": JSON,
    },
)


ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
        "role": ROLE,
        "content": st.text(max_size=5) | st.lists(PART, max_size=3),
        "name": st.text(max_size=5),
        "arguments": st.text(max_size=5),
        "output": st.text(max_size=5),
    },
)
ITEMS = st.text(max_size=5) | st.lists(ITEM, max_size=3)
PROMPT = st.sampled_from([[{"role": "user", "content": "hi"}], "p", ["p", 1], [[1, 2]]])


def joined(one: dict[str, Any], other: dict[str, Any]) -> bytes:
    return json.dumps({**one, **other}).encode()


def bodies(shape: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    names = [*shape.__struct_fields__, *SamplingBody.__struct_fields__, "adapters"]
    some = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    prompts = st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(MESSAGE, max_size=3) | PROMPT,
            "prompt": PROMPT,
            "input": ITEMS,
        },
    )
    return st.builds(joined, prompts, some)


@given(bodies(chat.ChatBody))
def test_chat_parser_raises_nothing_but_request_errors(body: bytes) -> None:
    try:
        request = chat.parse(body, CALL)
    except RequestError as error:
        assert 400 <= error.status < 500
        assert msgspec.json.decode(error.body())
    else:
        assert request.completions


@given(bodies(completions.CompletionsBody))
def test_completions_parser_raises_nothing_but_request_errors(body: bytes) -> None:
    try:
        request = completions.parse(body, CALL)
    except RequestError as error:
        assert 400 <= error.status < 500
    else:
        assert request.completions


@given(bodies(MessagesBody))
def test_anthropic_parser_raises_nothing_but_request_errors(body: bytes) -> None:
    try:
        anthropic.parse(body, CALL)
    except RequestError as error:
        assert 400 <= error.status < 500


@given(bodies(ResponsesBody))
def test_responses_parser_raises_nothing_but_request_errors(body: bytes) -> None:
    try:
        ResponsesProtocol(ResponseStore()).parse(body, CALL)
    except RequestError as error:
        assert 400 <= error.status < 500


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_parsed(body: bytes) -> None:
    for parse in (chat.parse, completions.parse, anthropic.parse):
        with pytest.raises(RequestError):
            parse(body, CALL)
