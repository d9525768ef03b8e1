"""The Anthropic protocol: golden events, blocks in every form, and what it refuses by name."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import ContentDelta, ReasoningDelta, ToolCallDelta
from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    JsonSchemaFormat,
    ToolChoice,
)
from mlx_isolate_engine.protocols import anthropic
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import EngineError, RequestError
from tests.fakes.scripted_service import CALL, summary

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def parse_all(**fields: Any) -> anthropic.MessageRequest:
    body = {"messages": [USER], "max_tokens": 8, **fields}
    return anthropic.parse(json.dumps(body).encode(), CALL)


def parse(**fields: Any) -> CompletionRequest:
    return parse_all(**fields).completions[0]


def messages_of(*messages: Any, **fields: Any) -> Sequence[dict[str, Any]]:
    prompt = parse(messages=messages, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_all(**fields)
    return caught.value


def events(
    deltas: Sequence[Delta], asked: dict[str, Any] | None = None, **ending: Any
) -> list[Any]:
    streamer = parse_all(stream=True, **(asked or {})).streamer()
    raw = [*streamer.begin(7)]
    for delta in deltas:
        raw += streamer.delta(0, delta)
    raw += [*streamer.finish(0, summary(**ending)), *streamer.end()]
    decoded = []
    for event in raw:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
    return decoded


def whole(deltas: Sequence[Delta], asked: dict[str, Any] | None = None, **ending: Any) -> Any:
    transcript = Transcript()
    for delta in deltas:
        transcript.add(delta)
    transcript.end(summary(**ending))
    return json.loads(parse_all(**(asked or {})).body([transcript]))


def test_text_stream_is_as_documented() -> None:
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert events([ContentDelta(text="a"), ContentDelta(text="b")]) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_0",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 7, **usage, "output_tokens": 0},
            },
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "a"},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "b"},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": 3,
            },
        },
        {"type": "message_stop"},
    ]


MIXED: list[Delta] = [
    ReasoningDelta(text="hm"),
    ContentDelta(text="I call."),
    ToolCallDelta(index=0, id="call_a", name="f", arguments=""),
    ToolCallDelta(index=0, arguments='{"x":'),
    ToolCallDelta(index=0, arguments="1}"),
    ToolCallDelta(index=1, id="call_b", name="g", arguments="{}"),
]


def test_blocks_follow_each_other_each_started_and_stopped() -> None:
    told = events(MIXED, finish_reason="tool_calls")
    starts = [one["content_block"] for one in told if one["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "f", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
    ]
    order = [(one["type"], one["index"]) for one in told if "index" in one]
    assert [index for kind, index in order if kind == "content_block_stop"] == [0, 1, 2, 3]
    assert [index for _, index in order] == sorted(index for _, index in order)
    parts = [
        one["delta"]["partial_json"]
        for one in told
        if one["type"] == "content_block_delta" and one["index"] == 2
    ]
    assert "".join(parts) == '{"x":1}'
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_whole_answer_has_the_same_blocks() -> None:
    assert whole(MIXED, finish_reason="tool_calls")["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I call."},
        {"type": "tool_use", "id": "call_a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
    ]


def test_thinking_that_is_to_be_omitted_leaves_empty_blocks() -> None:
    hidden: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}
    (thought, *others) = whole(MIXED, hidden, finish_reason="tool_calls")["content"]
    assert thought == {"type": "thinking", "thinking": "", "signature": ""}
    assert others == whole(MIXED, finish_reason="tool_calls")["content"][1:]
    told = [one for one in events(MIXED, hidden) if one.get("index") == 0]
    assert [one["type"] for one in told] == ["content_block_start", "content_block_stop"]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_string": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "tool_calls"}, ("tool_use", None)),
    ],
)
def test_stop_reasons(ending: dict[str, Any], expected: tuple[str, str | None]) -> None:
    answer = whole([ContentDelta(text="a")], **ending)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_error_event_is_named_and_typed() -> None:
    error = EngineError("No.", status=503, code="engine_stopping")
    event = parse_all(stream=True).streamer().error(error)
    assert event.startswith(b"event: error\ndata: ")
    payload = json.loads(event.split(b"data: ")[1])
    assert (payload["type"], payload["error"]["type"]) == ("error", "overloaded_error")


def test_keepalive_is_a_ping() -> None:
    keepalive = parse_all(stream=True).streamer().keepalive(1, 2)
    assert keepalive == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_conversation_with_tools_becomes_template_messages() -> None:
    history = messages_of(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I call."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "43"}],
                },
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    )
    assert history == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": 1}},
                    "id": "t1",
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "tool", "content": "43", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "go on"},
    )


def test_tool_results_stay_between_the_texts_around_them() -> None:
    texts = [{"type": "text", "text": text} for text in "abc"]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    assert messages_of({"role": "user", "content": [*texts, result, *texts]}) == (
        {"role": "user", "content": "abc"},
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "user", "content": "abc"},
    )
    assert messages_of({"role": "user", "content": []}) == ({"role": "user", "content": ""},)


def test_time_for_a_turn_grows_with_its_blocks_and_not_their_square() -> None:
    # Time that grows with the square would be minutes.
    block = {"type": "text", "text": "x" * 60}
    (turn,) = messages_of({"role": "user", "content": [block] * 250_000})
    assert len(turn["content"]) == 60 * 250_000


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert messages_of(USER, system=system) == messages_of(USER)


@pytest.mark.parametrize(
    ("content", "goes_on"),
    [
        ("{", True),
        ([{"type": "text", "text": "{"}], True),
        ("", False),
        ([], False),
        ([{"type": "text", "text": ""}], False),
        ([{"type": "text", "text": "a"}, {"type": "tool_use", "name": "f", "id": "1"}], False),
    ],
)
def test_a_text_of_the_assistant_that_stands_last_is_gone_on_with(
    content: Any, goes_on: bool
) -> None:
    prompt = parse(messages=[USER, {"role": "assistant", "content": content}]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs.get("continue_final_message", False) is goes_on


def test_settings_arrive() -> None:
    schema = {"type": "object"}
    request = parse(
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert request.stop == ("END",)
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert request.tool_choice == ToolChoice(mode="required", at_most_one=True)
    assert request.response_format == JsonSchemaFormat(
        schema=schema, param="output_config.format.schema"
    )
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert request.prompt.tools[0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"system": 5}, "system"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_wrong_value_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.status == 400
    assert (error.param or "").startswith(param)
