"""The responses protocol: numbered events, items in every form, and what is kept for later."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    JsonSchemaFormat,
    ToolChoice,
)
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol, ResponsesRequest
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import EngineError, RequestError
from tests.fakes.scripted_service import CALL, summary

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
MIXED: list[Delta] = [
    ReasoningDelta(text="hm"),
    ContentDelta(text="I "),
    ContentDelta(text="call."),
    ToolCallDelta(index=0, id="call_a", name="f", arguments='{"x":'),
    ToolCallDelta(index=0, arguments="1}"),
    ToolCallDelta(index=1, id="call_b", name="g", arguments="{}"),
]


def parse_all(kept_in: ResponseStore | None = None, **fields: Any) -> ResponsesRequest:
    body = {"input": "hi", **fields}
    return ResponsesProtocol(kept_in or ResponseStore()).parse(json.dumps(body).encode(), CALL)


def parse(**fields: Any) -> CompletionRequest:
    return parse_all(**fields).completions[0]


def messages_of(request: CompletionRequest) -> Sequence[dict[str, Any]]:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.messages


def events(request: ResponsesRequest, deltas: Sequence[Delta], **ending: Any) -> list[Any]:
    streamer = request.streamer()
    raw = [*streamer.begin(7)]
    for delta in deltas:
        raw += streamer.delta(0, delta)
    raw += [*streamer.finish(0, summary(**ending)), *streamer.end()]
    decoded = []
    for number, event in enumerate(raw):
        name, data = event.decode().removesuffix("\n\n").split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
        assert decoded[-1]["sequence_number"] == number
    return decoded


def whole(request: ResponsesRequest, deltas: Sequence[Delta], **ending: Any) -> Any:
    transcript = Transcript()
    for delta in deltas:
        transcript.add(delta)
    transcript.end(summary(**ending))
    return json.loads(request.body([transcript]))


def test_events_of_a_text_answer() -> None:
    told = events(parse_all(stream=True), [ContentDelta(text="a"), ContentDelta(text="b")])
    assert [one["type"] for one in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert told[6]["text"] == "ab"
    assert told[4]["item_id"] == told[8]["item"]["id"] == "msg_062c66a7a_0"
    assert told[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }


def test_streamed_and_whole_answer_have_the_same_output() -> None:
    streamed = events(parse_all(stream=True), MIXED, finish_reason="tool_calls")[-1]["response"]
    answer = whole(parse_all(), MIXED, finish_reason="tool_calls")
    assert streamed == answer
    assert [item["type"] for item in answer["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert answer["output"][2] == {
        "id": "fc_062c66a7a_2",
        "type": "function_call",
        "call_id": "call_a",
        "name": "f",
        "arguments": '{"x":1}',
        "status": "completed",
    }
    assert answer["status"] == "completed"


def test_every_item_that_is_added_is_done_once() -> None:
    told = events(parse_all(stream=True), MIXED, finish_reason="tool_calls")
    added = [one["output_index"] for one in told if one["type"] == "response.output_item.added"]
    done = [one["output_index"] for one in told if one["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2, 3]
    arguments = [
        one["arguments"] for one in told if one["type"] == "response.function_call_arguments.done"
    ]
    assert arguments == ['{"x":1}', "{}"]


def test_answer_cut_by_the_token_limit_is_incomplete() -> None:
    told = events(parse_all(stream=True), [ContentDelta(text="a")], finish_reason="length")
    assert told[-1]["type"] == "response.incomplete"
    response = told[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == told[-2]["item"]["status"] == "incomplete"


def test_logprobs_where_included() -> None:
    token = TokenLogprob(token="a", raw=b"a", logprob=-0.5)
    delta = ContentDelta(text="a", logprobs=(token,))
    request = parse_all(include=["message.output_text.logprobs"], top_logprobs=2, stream=True)
    assert request.completions[0].top_logprobs == 2
    expected = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    told = events(request, [delta])
    assert told[4]["logprobs"] == expected
    assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected


def test_error_event_has_both_forms() -> None:
    event = parse_all(stream=True).streamer().error(EngineError("No.", status=500, code="x"))
    assert event.startswith(b"event: error\n")
    payload = json.loads(event.split(b"data: ")[1])
    assert (payload["type"], payload["code"], payload["error"]["code"]) == ("error", "x", "x")


def test_previous_response_is_continued_with_its_output_and_without_its_instructions() -> None:
    store = ResponseStore()
    first = parse_all(store, instructions="Be brief.", tools=[TOOL])
    answer = whole(first, MIXED, finish_reason="tool_calls")
    output = {"type": "function_call_output", "call_id": "call_a", "output": "42"}
    second = parse_all(
        store, input=[output], previous_response_id=answer["id"], instructions="Be long."
    )
    assert messages_of(second.completions[0]) == (
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "call_a",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": 1}},
                },
                {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_a"},
    )


def test_items_sent_back_make_the_same_conversation_as_the_kept_one() -> None:
    store = ResponseStore()
    answer = whole(parse_all(store), MIXED, finish_reason="tool_calls")
    kept = parse_all(store, input="next", previous_response_id=answer["id"])
    user = {"role": "user", "content": "hi"}
    nexts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "next"}]}
    sent = parse_all(store, input=[user, *answer["output"], nexts])
    assert messages_of(sent.completions[0]) == messages_of(kept.completions[0])


def test_texts_and_calls_that_follow_each_other_are_one_turn_whatever_their_order() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "a"},
        {**call, "call_id": "1"},
        {"role": "assistant", "content": "b"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"role": "assistant", "content": ""},
    ]
    function = {"name": "f", "arguments": {}}
    assert messages_of(parse(input=items)) == (
        {
            "role": "assistant",
            "content": "ab",
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "function": function, "id": "1"},
                {"type": "function", "function": function, "id": "2"},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    )


def test_time_for_a_turn_grows_with_its_items_and_not_their_square() -> None:
    # Time that grows with the square would be minutes.
    text = {"role": "assistant", "content": "x" * 60}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    (turn,) = messages_of(parse(input=[text] * 100_000 + [call] * 100_000))
    assert len(turn["content"]) == 60 * 100_000
    assert len(turn["tool_calls"]) == 100_000


def test_response_that_is_not_kept_is_refused_clearly() -> None:
    store = ResponseStore()
    whole(parse_all(store, store=False), [ContentDelta(text="a")])
    for response_id in ("resp_0", "resp_missing"):
        with pytest.raises(RequestError) as caught:
            parse_all(store, previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


def test_store_is_bounded_by_number_and_bytes() -> None:
    store = ResponseStore(responses_max=2, bytes_max=1000)
    for number in range(3):
        store.put(f"r{number}", b"x" * 10, (), ())
    assert store.get("r0") is None
    assert store.get("r1") is not None
    store.put("r3", b"x" * 10, (), ())
    assert store.get("r2") is None, "the longest unused one makes room"
    store.put("big", b"x" * 990, (), ())
    assert store.get("r1") is None
    assert store.get("big") is not None
    store.put("too big", b"x" * 2000, (), ())
    assert store.get("too big") is None
    assert not store.remove("big")


def test_settings_arrive() -> None:
    schema = {"type": "object"}
    request = parse(
        max_output_tokens=9,
        temperature=0.5,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={
            "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
            "verbosity": "low",
        },
        reasoning={"effort": "low"},
        input=[{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
    )
    assert request.max_tokens == 9
    assert request.sampling.temperature == 0.5
    assert request.tool_choice == ToolChoice(mode="named", name="f", at_most_one=True)
    assert request.response_format == JsonSchemaFormat(schema=schema, param="text.format.schema")
    assert [message["role"] for message in messages_of(request)] == ["system", "user"]
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.template_kwargs == {"reasoning_effort": "low", "verbosity": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "foo", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_wrong_value_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_was_asked_comes_back() -> None:
    asked: dict[str, Any] = {
        "metadata": {"who": "me"},
        "parallel_tool_calls": False,
        "text": {"verbosity": "low"},
    }
    answer = whole(parse_all(**asked), [ContentDelta(text="a")])
    assert answer["text"].pop("format") == {"type": "text"}
    assert {name: answer[name] for name in asked} == asked
