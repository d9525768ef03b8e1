"""Structured output: whatever ends by itself validates, and neighbours are untouched."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.completion.request import (
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingRequest,
    ToolChoice,
)
from mlx_isolate_shared.errors import RequestError
from tests.integration.generation_rig import Answer, Rig, chat_request, rig, run_async, text_request
from tests.material.models import ModelSpec

VERDICT = JsonSchemaFormat(
    schema={
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "reason": {"type": "string", "maxLength": 20}},
        "required": ["ok", "reason"],
        "additionalProperties": False,
    }
)
NUMBERS = JsonSchemaFormat(
    schema={"type": "array", "items": {"enum": [3, 14, 159]}, "minItems": 2, "maxItems": 4}
)


def check_verdict(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"ok", "reason"}
    assert isinstance(value["ok"], bool)
    assert isinstance(value["reason"], str) and len(value["reason"]) <= 20


def check_numbers(text: str) -> None:
    value = json.loads(text)
    assert 2 <= len(value) <= 4
    assert all(isinstance(number, int) for number in value)


def constrained(shape: Any, seed: int, **fields: Any) -> CompletionRequest:
    sampling = SamplingRequest(temperature=1.0 if seed else 0.0, seed=seed)
    return text_request("say", response_format=shape, sampling=sampling, **fields)


@pytest.mark.case("41")
@pytest.mark.parametrize("concurrency", [8, 1])
def test_what_ends_by_itself_validates_beside_plain_neighbours(
    full_model: Path, concurrency: int
) -> None:
    async def test() -> None:
        async with rig(full_model, decode_concurrency=concurrency) as subject:
            plain = text_request("hello", max_tokens=60)
            alone = await subject.run(plain)
            ended = 0
            for seed in range(4):
                verdict, numbers, anything, neighbour = await asyncio.gather(
                    subject.run(constrained(VERDICT, seed, max_tokens=400)),
                    subject.run(constrained(NUMBERS, seed, max_tokens=200)),
                    subject.run(constrained(JsonObjectFormat(), seed, max_tokens=30)),
                    subject.run(plain),
                )
                assert neighbour.text == alone.text
                for answer, check in ((verdict, check_verdict), (numbers, check_numbers)):
                    if answer.end.finish_reason == "stop":
                        ended += 1
                        check(answer.text)
                assert anything.text.lstrip()[:1] == "{"
            assert ended >= 4

    run_async(test())


@pytest.mark.case("41")
def test_a_plain_request_after_a_constrained_one_is_plain(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            before = await subject.run(text_request("hello", max_tokens=20))
            for _ in range(3):
                first = await subject.run(constrained(VERDICT, 1, max_tokens=200))
                again = await subject.run(text_request("hello", max_tokens=20))
                second = await subject.run(constrained(VERDICT, 1, max_tokens=200))
                assert again.text == before.text
                assert first.text == second.text

    run_async(test())


@pytest.mark.case("41")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"enum": ["x" * (300 << 10)]},
    ],
    ids=["type", "not", "pattern", "nowhere", "itself", "large"],
)
def test_a_schema_that_cannot_be_kept_is_400_up_front(
    full_model: Path, schema: dict[str, Any]
) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            with pytest.raises(RequestError) as caught:
                await subject.service.prepare(constrained(JsonSchemaFormat(schema=schema), 0))
            assert caught.value.param == "response_format"
            assert subject.service.places_taken == 0
            check = await subject.run(text_request("x", max_tokens=2))
            assert check.end.completion_tokens == 2

    run_async(test())


@pytest.mark.case("41")
def test_a_deep_schema_is_400(full_model: Path) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}

    async def test() -> None:
        async with rig(full_model) as subject:
            with pytest.raises(RequestError):
                await subject.service.prepare(constrained(JsonSchemaFormat(schema=schema), 0))

    run_async(test())


@pytest.mark.case("41")
def test_a_length_cut_inside_the_json_says_length(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            answer = await subject.run(constrained(VERDICT, 0, max_tokens=5))
            assert answer.end.finish_reason == "length"

    run_async(test())


TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
)


async def call(subject: Rig, choice: ToolChoice) -> Answer:
    request = chat_request("go", tools=TOOLS, tool_choice=choice, max_tokens=200)
    return await subject.run(request)


def test_a_forced_call_is_a_call_of_that_function(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    async def test() -> None:
        async with rig(model_folder(ModelSpec(template="tools"))) as subject:
            answer = await call(subject, ToolChoice(mode="named", name="add"))
            (made,) = answer.calls
            assert made.name == "add"
            assert list(json.loads(made.arguments)) == ["a"]
            assert answer.text == ""
            assert answer.end.finish_reason == "tool_calls"
            with pytest.raises(RequestError) as caught:
                await call(subject, ToolChoice(mode="named", name="nothing"))
            assert caught.value.param == "tool_choice"

    run_async(test())


def test_a_call_cannot_be_forced_without_a_format_for_it(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            with pytest.raises(RequestError) as caught:
                await call(subject, ToolChoice(mode="required"))
            assert caught.value.param == "tool_choice"

    run_async(test())


def test_the_answer_after_an_open_think_block_is_constrained(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(template="thinking"))
    # The end marker gets a bias, so that a model of random weights ends its thinking soon.
    sampling = SamplingRequest(temperature=1.0, seed=3, logit_bias={273: 12.0})

    async def test() -> None:
        async with rig(folder) as subject:
            request = chat_request(
                "go",
                template_kwargs={"open_thinking": True},
                response_format=NUMBERS,
                sampling=sampling,
                max_tokens=200,
            )
            answer = await subject.run(request)
            assert answer.reasoning
            assert answer.text.lstrip()[0] == "["

    run_async(test())
