"""What a kept response was made of, listed as the official client pages through it."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from mlx_isolate_engine.completion.events import ContentDelta, ToolCallDelta
from mlx_isolate_engine.protocols import responses
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_engine.protocols.response_input import list_page
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import RequestError
from tests.fakes.scripted_service import CALL, summary

TYPED: TypeAdapter[Any] = TypeAdapter(ResponseItem)


class Conversation:
    """Responses of one store, each the continuation of the one before."""

    def __init__(self) -> None:
        self._store = ResponseStore()
        self._protocol = ResponsesProtocol(self._store)
        self.last: str | None = None

    def say(self, given: Any, *answer: Delta, unique: str = "0", **fields: Any) -> Any:
        body = {"input": given, "previous_response_id": self.last, **fields}
        call = type(CALL)(
            identity=CALL.identity, request_id=CALL.request_id, unique=unique, created=1
        )
        request = self._protocol.parse(json.dumps(body).encode(), call)
        transcript = Transcript()
        for delta in answer:
            transcript.add(delta)
        transcript.end(summary())
        made = json.loads(request.body([transcript]))
        self.last = made["id"]
        return made

    def list(self, response_id: str, **query: str) -> Any:
        kept = self._store.get(response_id)
        assert kept is not None
        return json.loads(list_page(kept.items, query))


def text_of(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])


def test_what_was_sent_is_listed_in_the_form_of_answers() -> None:
    given = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"text": "hm"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "yes"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"type": "function_call_output", "call_id": "d", "output": [{"text": "43"}]},
    ]
    conversation = Conversation()
    made = conversation.say(given, ContentDelta(text="ok"))
    listed = conversation.list(made["id"], order="asc")
    assert listed["object"] == "list"
    assert listed["has_more"] is False
    items = listed["data"]
    assert (listed["first_id"], listed["last_id"]) == (items[0]["id"], items[-1]["id"])
    assert [item["type"] for item in items] == [
        *("message", "message", "reasoning", "message", "message"),
        *("function_call", "function_call_output", "function_call_output"),
    ]
    assert [item.get("role") for item in items[:2]] == ["developer", "user"]
    assert items[2]["id"] == "rs_x"
    assert items[3]["content"] == [{"type": "refusal", "refusal": "no"}]
    assert items[5]["arguments"] == "{}"
    assert len({item["id"] for item in items}) == len(items)
    for item in items:
        TYPED.validate_python(item, strict=True)


def test_a_continuation_was_made_of_the_whole_conversation() -> None:
    conversation = Conversation()
    call = ToolCallDelta(index=0, id="call_a", name="f", arguments="{}")
    first = conversation.say("one", ContentDelta(text="I call."), call, unique="1")
    output = {"type": "function_call_output", "call_id": "call_a", "output": "42"}
    second = conversation.say([output], ContentDelta(text="done"), unique="2")
    third = conversation.say("three", ContentDelta(text="bye"), unique="3")
    items = conversation.list(third["id"], order="asc")["data"]
    assert items[1:3] == first["output"]
    assert items[4:5] == second["output"]
    assert [text_of(items[0]), text_of(items[5])] == ["one", "three"]
    assert len({item["id"] for item in items}) == len(items) == 6
    assert [text_of(one) for one in conversation.list(first["id"])["data"]] == ["one"]


def test_pages_follow_each_other_in_either_order() -> None:
    conversation = Conversation()
    # The same id twice must not send a client round in circles.
    given = [{"role": "user", "content": str(n), "id": "msg_same"} for n in range(5)]
    made = conversation.say(given, ContentDelta(text="ok"))
    for query, expected in (
        ({}, "43210"),
        ({"order": "desc", "limit": "2"}, "43210"),
        ({"order": "asc", "limit": "2"}, "01234"),
        ({"order": "asc", "limit": "5"}, "01234"),
    ):
        seen = ""
        after: dict[str, str] = {}
        while True:
            page = conversation.list(made["id"], **query, **after)
            seen += "".join(text_of(item) for item in page["data"])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == expected, query
    end = conversation.list(made["id"], after=page["last_id"], order="asc")
    assert end == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "x"),
        ("limit", "000000001" + "9" * 5000),
        ("order", "up"),
        ("after", "nobody"),
    ],
)
def test_a_wrong_page_is_refused_by_name(name: str, value: str) -> None:
    conversation = Conversation()
    made = conversation.say("hi", ContentDelta(text="ok"))
    with pytest.raises(RequestError) as caught:
        conversation.list(made["id"], **{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_what_is_not_answered_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing a body of many items takes seconds, and most of such are refused as too long."""

    def fail(*_: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(responses, "listed_input", fail)
    ResponsesProtocol(ResponseStore()).parse(b'{"input": "hi"}', CALL)
