"""The chat protocol's requests: what arrives of them, and what is refused by name."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    JsonObjectFormat,
    JsonSchemaFormat,
    ToolChoice,
)
from mlx_isolate_engine.protocols import chat
from mlx_isolate_shared.errors import RequestError
from tests.material.chat_requests import USER, parse, parse_all


def messages_of(*messages: Any) -> Sequence[dict[str, Any]]:
    prompt = parse(messages=messages).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_all(**fields)
    assert caught.value.status == 400
    return caught.value


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
        ("repetition_penalty", -0.1),
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
        ({"chat_template_kwargs": {"sampling_rate": 1}}, "chat_template_kwargs.sampling_rate"),
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
    assert parse(repetition_penalty=0).sampling.repetition_penalty == 0  # mlx-lm's own default


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
