"""The chat protocol: golden bytes of its answers, and what it refuses by name."""

import json
from collections.abc import Callable, Sequence
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
    JsonObjectFormat,
    JsonSchemaFormat,
    ToolChoice,
)
from mlx_isolate_engine.protocols import chat
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import EngineError, RequestError
from tests.fakes.scripted_service import CALL, summary

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> CompletionRequest:
    return parse_all(**fields).completions[0]


def parse_all(**fields: Any) -> chat.ChatRequest:
    return chat.parse(json.dumps({"messages": [USER], **fields}).encode(), CALL)


def messages_of(*messages: Any) -> Sequence[dict[str, Any]]:
    prompt = parse(messages=messages).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_all(**fields)
    assert caught.value.status == 400
    return caught.value


def stream(request: chat.ChatRequest, deltas: Sequence[Delta], **ending: Any) -> list[Any]:
    streamer = request.streamer()
    events = [*streamer.begin(7)]
    for delta in deltas:
        events += streamer.delta(0, delta)
    events += streamer.finish(0, summary(**ending))
    events += streamer.end()
    assert events.pop() == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def whole(request: chat.ChatRequest, deltas: Sequence[Delta], **ending: Any) -> Any:
    transcripts = []
    for _ in request.completions:
        transcript = Transcript()
        for delta in deltas:
            transcript.add(delta)
        transcript.end(summary(**ending))
        transcripts.append(transcript)
    return json.loads(request.body(transcripts))


@pytest.mark.case("31")
def test_stream_is_byte_for_byte_as_documented() -> None:
    streamer = parse_all(stream=True).streamer()
    events = [
        *streamer.begin(7),
        *streamer.delta(0, ContentDelta(text='é"\n')),
        *streamer.finish(0, summary("length")),
        *streamer.end(),
    ]
    head = (
        b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":2,"model":"m",'
        b'"system_fingerprint":"fp_0","choices":[{"index":0,"delta":'
    )
    assert events[0] == (
        head + b'{"role":"assistant","content":"","refusal":null},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert events[1] == (
        head + '{"content":"é\\"\\n"},"logprobs":null,"finish_reason":null}]}\n\n'.encode()
    )
    assert events[2].startswith(head + b'{},"logprobs":null,"finish_reason":"length"}],"timings":{')
    assert events[3:] == [b"data: [DONE]\n\n"]


@pytest.mark.case("31")
def test_role_comes_first_and_once() -> None:
    chunks = stream(parse_all(stream=True), [ContentDelta(text="a"), ContentDelta(text="b")])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.case("40")
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_chunk_unless_asked_for(options: Any) -> None:
    chunks = stream(parse_all(stream=True, stream_options=options), [ContentDelta(text="a")])
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.case("40")
def test_usage_chunk_has_no_choices_and_comes_last() -> None:
    request = parse_all(stream=True, stream_options={"include_usage": True})
    chunks = stream(request, [ContentDelta(text="a")])
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_fingerprint_changes_with_the_adapter() -> None:
    marks = {
        whole(parse_all(adapters=name), [ContentDelta(text="a")])["system_fingerprint"]
        for name in (None, "polite", "terse")
    }
    assert len(marks) == 3


def test_whole_answer_has_usage_timings_and_fingerprint() -> None:
    answer = whole(parse_all(), [ContentDelta(text="a"), ContentDelta(text="b")])
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"] == "fp_0"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert answer["timings"]["predicted_n"] == 3
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_reasoning_has_both_names() -> None:
    deltas: list[Delta] = [ReasoningDelta(text="hm"), ContentDelta(text="a")]
    chunk = stream(parse_all(stream=True), deltas)[1]
    assert chunk["choices"][0]["delta"] == {"reasoning": "hm", "reasoning_content": "hm"}
    message = whole(parse_all(), deltas)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"


@pytest.mark.case("34")
def test_tool_calls_stream_with_index_and_id_and_join_to_the_whole() -> None:
    deltas = [
        ToolCallDelta(index=0, id="call_a", name="f", arguments=""),
        ToolCallDelta(index=0, arguments='{"x":'),
        ToolCallDelta(index=0, arguments="1}"),
        ToolCallDelta(index=1, id="call_b", name="g", arguments="{}"),
    ]
    chunks = stream(parse_all(stream=True, tools=[TOOL]), deltas, finish_reason="tool_calls")
    parts = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert parts[0] == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert parts[1] == {"index": 0, "function": {"arguments": '{"x":'}}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = whole(parse_all(tools=[TOOL]), deltas)["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"x":1}', "{}"]


@pytest.mark.case("43")
def test_logprobs_have_bytes_and_alternatives() -> None:
    other = TokenLogprob(token="b", raw=b"b", logprob=-2.0)
    token = TokenLogprob(token="é", raw="é".encode(), logprob=-0.5, top=(other,))
    deltas = [ContentDelta(text="é", logprobs=(token,))]
    expected = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
    }
    request = parse_all(logprobs=True, top_logprobs=1, stream=True)
    chunk = stream(request, deltas)[1]
    assert chunk["choices"][0]["logprobs"] == {"content": [expected], "refusal": None}
    choice = whole(request, deltas)["choices"][0]
    assert choice["logprobs"]["content"] == [expected]


@pytest.mark.case("43")
def test_n_gives_each_choice_its_index() -> None:
    request = parse_all(n=3, seed=5)
    assert [one.sampling.seed for one in request.completions] == [5, 6, 7]
    answer = whole(request, [ContentDelta(text="a")])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 9


def test_error_event_has_the_envelope_and_no_finish_reason() -> None:
    event = parse_all(stream=True).streamer().error(EngineError("No.", status=500, code="x"))
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {"message": "No.", "type": "server_error", "param": None, "code": "x"}
    }


@pytest.mark.case("37")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": -1}, -1),
        ({"max_tokens": 1e9}, 10**9),
        ({"max_tokens": 10**30}, 2**31 - 1),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
    ],
)
def test_token_limit(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).max_tokens == expected


@pytest.mark.case("37", "39", "43")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", "10"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("temperature", -1),
        ("temperature", 100),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("-inf")),
        ("temperature", True),
        ("top_p", 2),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", {}),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("stream", 1),
        ("n", 0),
        ("n", 17),
        ("logprobs", 3),
        ("top_logprobs", 21),
        ("messages", "hi"),
        ("messages", {}),
        ("messages", []),
        ("messages", None),
        ("tools", {}),
        ("tool_choice", "always"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "missing"}}),
        ("functions", [{"name": "f"}]),
        ("adapters", 5),
        ("num_draft_tokens", 0),
    ],
)
def test_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.case("36", "37", "39")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": [1]}, "stop[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "system", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "s"}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"modalities": ["audio"]}, "modalities"),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
        ),
        (
            {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]},
            "messages[1].audio",
        ),
    ],
)
def test_wrong_inner_value_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.case("37")
def test_null_is_absent() -> None:
    names = [*chat.ChatBody.__struct_fields__, "temperature", "top_k", "logit_bias", "seed"]
    nothing: dict[str, Any] = dict.fromkeys(name for name in names if name != "messages")
    assert parse(**nothing) == parse()
    for name in nothing:
        assert parse(**{name: None}) == parse(), name


@pytest.mark.case("37")
def test_unknown_fields_are_ignored() -> None:
    more = {
        "foo": 1,
        "metadata": {},
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "user": "x",
        "stream_options": None,
    }
    assert parse(**more) == parse()


def test_sampler_fields_arrive() -> None:
    sampling = parse(temperature=0, top_p=0.5, top_k=-1, logit_bias={"5": -100}, seed=-1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.seed is None


@pytest.mark.case("36")
def test_content_parts_join_without_separator() -> None:
    parts = [{"type": "text", "text": "My name is "}, {"type": "text", "text": "Zorblax-17."}]
    for role in ("system", "user", "assistant", "tool"):
        (message,) = messages_of({"role": role, "content": parts})
        assert message["content"] == "My name is Zorblax-17."
    assert messages_of({"role": "user", "content": []})[0]["content"] == ""


def test_developer_becomes_system() -> None:
    assert messages_of({"role": "developer", "content": "x"})[0]["role"] == "system"


def test_replayed_tool_history_is_lenient() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    broken = {"function": {"name": "f", "arguments": '{"x":'}}
    as_object = {"function": {"name": "f", "arguments": {"x": 1}}}
    history = messages_of(
        {"role": "assistant", "content": None, "tool_calls": [call, broken, as_object]},
        {"role": "tool", "content": None, "tool_call_id": "unknown"},
    )
    arguments = [one["function"]["arguments"] for one in history[0]["tool_calls"]]
    assert arguments == [{"x": 1}, '{"x":', {"x": 1}]
    assert history[1] == {"role": "tool", "content": "", "tool_call_id": "unknown"}


def test_tools_arrive_in_template_form() -> None:
    request = parse(tools=[{"function": {"name": "f"}}], tool_choice="required")
    assert isinstance(request.prompt, ChatPrompt)
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "parameters": parameters}
    assert request.prompt.tools == ({"type": "function", "function": function},)
    assert request.tool_choice == ToolChoice(mode="required")


def test_response_formats() -> None:
    schema = {"type": "object"}
    assert parse(response_format={"type": "text"}).response_format is None
    assert parse(response_format={"type": "json_object"}).response_format == JsonObjectFormat()
    assert parse(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ).response_format == JsonSchemaFormat(
        schema=schema, strict=True, param="response_format.json_schema.schema"
    )


def test_template_arguments_take_effort_and_verbosity() -> None:
    given = {"enable_thinking": False, "verbosity": "high"}
    prompt = parse(reasoning_effort="low", verbosity="low", chat_template_kwargs=given).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {**given, "reasoning_effort": "low"}
    plain = parse(verbosity="low").prompt
    assert isinstance(plain, ChatPrompt)
    assert plain.template_kwargs == {"verbosity": "low"}


def test_a_refusal_that_is_sent_back_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": None}
    silent = {"role": "assistant", "content": None, "function_call": None, "audio": None}
    prompt = parse(messages=[USER, said, USER, silent]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message["content"] for message in prompt.messages] == ["hi", "No.", "hi", ""]


@pytest.mark.parametrize(("parallel", "only_one"), [(None, False), (True, False), (False, True)])
def test_one_call_at_most_where_a_request_says_so(parallel: bool | None, only_one: bool) -> None:
    tools = [{"function": {"name": "f"}}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        request = parse(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
        assert request.tool_choice.at_most_one is only_one


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.case("41")
def test_deep_schema_is_refused() -> None:
    schema = nested(200, lambda inner: {"properties": {"x": inner}})
    error = refused(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert error.param == "response_format.json_schema.schema"


def test_forbidden_token_has_a_finite_logprob() -> None:
    other = TokenLogprob(token="b", raw=b"b", logprob=float("-inf"))
    token = TokenLogprob(token="a", raw=b"a", logprob=0.0, top=(other,))
    answer = whole(parse_all(logprobs=True), [ContentDelta(text="a", logprobs=(token,))])
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"][0]["logprob"] == -9999.0
