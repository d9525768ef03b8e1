"""Requests at the edge of what is allowed, sent to a real engine that must answer on."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine_process import REAL, EngineProcess
from tests.material.models import ModelSpec
from tests.raw_http import RawResponse, ask

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CONTEXT = 96
# A context so small that a completion without a limit ends soon.
SMALL = ModelSpec(kind="full", context=CONTEXT)


def served(folder: Path) -> Iterator[EngineProcess]:
    with EngineProcess(REAL) as engine:
        engine.start(str(folder))
        engine.wait_ready()
        yield engine
        # "Alive after each": the process that began is the one that still answers.
        assert engine.child.poll() is None
        assert post(engine, messages=[USER], max_tokens=2).status == 200


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    yield from served(model_folder(SMALL))


def post(engine: EngineProcess, path: str = CHAT, **body: Any) -> RawResponse:
    return asyncio.run(asyncio.wait_for(ask(engine.socket_path, path, body), 60))


def prompt_tokens(engine: EngineProcess, *messages: dict[str, Any]) -> int:
    response = post(engine, messages=list(messages), max_tokens=1)
    assert response.status == 200, response.body
    count: int = response.json["usage"]["prompt_tokens"]
    return count


@pytest.mark.case("36")
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_the_joined_string(engine: EngineProcess, role: str) -> None:
    parts = [{"type": "text", "text": "My name is "}, {"type": "text", "text": "Zorblax-17."}]
    joined = prompt_tokens(engine, USER, {"role": role, "content": "My name is Zorblax-17."})
    assert prompt_tokens(engine, USER, {"role": role, "content": parts}) == joined


@pytest.mark.case("37")
@pytest.mark.parametrize("limit", [-1, 1_000_000_000, 1e9])
def test_huge_limit_is_capped_by_the_context(engine: EngineProcess, limit: Any) -> None:
    answer = post(engine, messages=[USER], max_tokens=limit).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] <= CONTEXT


@pytest.mark.case("37")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "10"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("stop", 5),
        ("stream", "yes"),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {"-1": 1}),
        ("adapters", "/etc/passwd"),
        ("draft_model", "../../etc"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_value_is_400_by_name(
    engine: EngineProcess, field: str, value: Any, stream: bool
) -> None:
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "stream": stream, field: value}
    response = post(engine, **body)
    assert response.status == 400
    assert response.json["error"]["param"].startswith(field)


@pytest.mark.case("37")
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 100_000},
        {"temperature": 2, "min_p": 1},
        {"seed": 2**63 - 1, "temperature": 1},
        {"logit_bias": {}},
        {"stop": []},
        {"stream_options": None, "tools": [], "response_format": {"type": "text"}},
    ],
)
def test_boundary_value_is_answered(engine: EngineProcess, fields: dict[str, Any]) -> None:
    assert post(engine, messages=[USER], max_tokens=4, **fields).status == 200


@pytest.mark.case("39")
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "only"}],
        [{"role": "assistant", "content": "only"}],
        [USER, USER],
        [USER, {"role": "system", "content": "late"}, USER],
        [{"role": "developer", "content": "d"}, USER],
        [{"role": "user", "content": ""}],
        [USER, {"role": "assistant", "content": None}, USER],
    ],
)
def test_odd_conversation_is_answered(engine: EngineProcess, messages: Any) -> None:
    assert post(engine, messages=messages, max_tokens=2).status == 200


@pytest.mark.case("39")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": []},
        {"messages": {}},
        {"messages": "hi"},
        {"messages": [1]},
        {"messages": None},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "foo", "content": "x"}]},
    ],
    ids=json.dumps,
)
def test_what_is_no_conversation_is_400(engine: EngineProcess, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        response = post(engine, max_tokens=2, stream=stream, **fields)
        assert response.status == 400, response.body
        assert response.json["error"]["param"].startswith("messages")


LONG = "x" * 2000
NONSENSE = {"type": "nonsense"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "schema": NONSENSE}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "output_config": {"format": {"type": "json_schema", "schema": NONSENSE}},
            },
            "output_config.format.schema",
        ),
        (
            CHAT,
            {
                "messages": [USER],
                "response_format": {"type": "json_schema", "json_schema": {"schema": NONSENSE}},
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_the_model_refuses_is_named_in_the_words_of_its_api(
    engine: EngineProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    response = post(engine, path, **fields)
    assert (response.status, response.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_an_answer_that_has_begun_is_no_turn_of_its_own(engine: EngineProcess, path: str) -> None:
    def tokens(*messages: dict[str, Any]) -> int:
        answer = post(engine, path, messages=list(messages), max_tokens=1).json
        usage: dict[str, int] = answer.get("usage", answer)
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)

    assert tokens(USER, {"role": "assistant", "content": "abc"}) == tokens(USER) + 3


@pytest.mark.case("36")
@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "foo"}], ids=json.dumps
)
def test_a_part_that_is_no_text_is_400(engine: EngineProcess, part: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "see"}, part]
    response = post(engine, messages=[{"role": "user", "content": parts}], max_tokens=2)
    assert response.status == 400
    assert response.json["error"]["param"].startswith("messages[0].content[1]")


@pytest.mark.case("39")
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("no_system", [{"role": "system", "content": "s"}, USER]),
        ("alternating", [USER, USER]),
        ("none", [USER]),
        ("broken", [USER]),
    ],
)
def test_template_that_refuses_is_400_with_its_reason(
    model_folder: Callable[[ModelSpec], Path], template: str, messages: Any
) -> None:
    folder = model_folder(ModelSpec(kind="full", context=CONTEXT, template=template))
    with EngineProcess(REAL) as engine:
        engine.start(str(folder))
        engine.wait_ready()
        for stream in (False, True):
            response = post(engine, messages=messages, max_tokens=2, stream=stream)
            assert response.status == 400, response.body
            assert "Error" not in response.json["error"]["message"]
        completion = post(engine, "/v1/completions", prompt="a", max_tokens=2)
        assert completion.status == 200


@pytest.mark.case("44")
def test_prompts_around_the_context(engine: EngineProcess) -> None:
    def complete(tokens: int, **fields: Any) -> RawResponse:
        return post(engine, "/v1/completions", prompt=[65] * tokens, **fields)

    process = psutil.Process(engine.child.pid)
    complete(CONTEXT * 20)
    at_first = process.memory_info().rss
    for tokens in (CONTEXT, CONTEXT + 1, CONTEXT * 20):
        for stream in (False, True):
            response = complete(tokens, max_tokens=4, stream=stream)
            assert response.status == 400
            assert response.json["error"]["code"] == "context_length_exceeded"
    assert process.memory_info().rss - at_first <= 4 << 20, "a refusal costs memory"
    nearly = complete(CONTEXT - 3, max_tokens=50).json
    assert nearly["choices"][0]["finish_reason"] == "length"
    assert nearly["usage"]["total_tokens"] <= CONTEXT


@pytest.mark.case("43")
def test_logprobs_with_a_stop_string_join_to_the_content(engine: EngineProcess) -> None:
    text = post(engine, messages=[USER], max_tokens=12, temperature=0).json["choices"][0][
        "message"
    ]["content"]
    stop = text[4:6]
    for stream in (False, True):
        response = post(
            engine,
            messages=[USER],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
            stop=stop,
            stream=stream,
        )
        if stream:
            choices = [one["choices"][0] for one in response.data]
            content = "".join(one["delta"].get("content") or "" for one in choices)
            tokens = [
                token for one in choices for token in (one["logprobs"] or {}).get("content", [])
            ]
        else:
            (choice,) = response.json["choices"]
            content, tokens = choice["message"]["content"], choice["logprobs"]["content"]
        assert content == text[: text.index(stop)]
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode().startswith(content)
        assert all(len(token["top_logprobs"]) == 20 for token in tokens)


@pytest.mark.case("49")
def test_model_field_is_not_looked_up(engine: EngineProcess) -> None:
    for model in ("nope/nope", "../../etc", "/etc/passwd", "", 5, None):
        response = post(engine, messages=[USER], max_tokens=1, model=model)
        assert response.status == 200
        assert response.json["model"] == "m"
