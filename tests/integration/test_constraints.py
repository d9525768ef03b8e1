"""Structured output: whatever ends by itself validates, and neighbours are untouched."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.chat_templates import muse_spark

from mlx_isolate_engine.completion.constraints import ConstraintCompiler
from mlx_isolate_engine.completion.events import ToolCallDelta
from mlx_isolate_engine.completion.grammars import Marker, json_answer_or_calls
from mlx_isolate_engine.completion.request import (
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingRequest,
    ToolChoice,
)
from mlx_isolate_engine.generation.plan import Constraint
from mlx_isolate_shared.errors import RequestError
from tests.integration.generation_rig import (
    Answer,
    Rig,
    chat_request,
    load_tiny,
    rig,
    run_async,
    text_request,
)
from tests.material.models import ModelSpec
from tests.material.schemas import GENERATED, NESTED, TOOLS, VERDICT, declared
from tests.material.tokenizer import THINK_END

NUMBERS = JsonSchemaFormat(
    schema={"type": "array", "items": {"enum": [3, 14, 159]}, "minItems": 2, "maxItems": 4}
)

# The end marker gets a bias, so that a model of random weights ends its thinking soon.
THINK_NO_MORE = SamplingRequest(temperature=1.0, seed=3, logit_bias={THINK_END: 12.0})


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


def test_an_answer_that_goes_on_goes_on_in_its_format(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    async def test() -> None:
        async with rig(model_folder(ModelSpec(template="thinking"))) as subject:

            async def go_on(begun: str, **fields: Any) -> Answer:
                arguments = {"continue_final_message": True, "keep_thinking": True}
                request = chat_request(
                    "go", begun, template_kwargs=arguments, response_format=NUMBERS, **fields
                )
                return await subject.run(request)

            begun = ("[14, 1", "[14", "<think>[3</think>[14, 15")
            whole, prefaced, thought, *rests = await asyncio.gather(
                go_on("[3, 3, 3, 3]", max_tokens=20),
                go_on("In numbers:", max_tokens=200),
                go_on("<think>[3", max_tokens=60, sampling=THINK_NO_MORE),
                *(go_on(text, max_tokens=200) for text in begun),
            )
            for text, rest in zip(begun, rests, strict=True):
                assert rest.end.finish_reason == "stop"
                check_numbers(text.rpartition("</think>")[2] + rest.text)
            assert (whole.text, whole.end.finish_reason) == ("", "stop")
            # Before an answer there may stand what is no beginning of one, or an open think block.
            check_numbers(prefaced.text)
            check_numbers(thought.text)

    run_async(test())


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

    async def test() -> None:
        async with rig(folder) as subject:
            request = chat_request(
                "go",
                template_kwargs={"open_thinking": True},
                response_format=NUMBERS,
                sampling=THINK_NO_MORE,
                max_tokens=200,
            )
            answer = await subject.run(request)
            assert answer.reasoning
            assert answer.text.lstrip()[0] == "["

    run_async(test())


def test_an_answer_whose_messages_have_heads_is_constrained_behind_its_own(
    full_model: Path,
) -> None:
    tokenizer: Any = load_tiny(full_model).tokenizer
    tokenizer._response_format = muse_spark.RESPONSE_FORMAT
    vocabulary = from_tokenizer(tokenizer._tokenizer)
    compiler = ConstraintCompiler(tokenizer, vocabulary.vocab_size, lambda: vocabulary)
    request = chat_request("go", response_format=NUMBERS)
    constraint = compiler.compile(request, "header")
    assert isinstance(constraint, Constraint)
    assert constraint.after is not None
    assert constraint.after.text == b"to=user<|message|>"
    at_once = compiler.compile(request, "normal")
    assert isinstance(at_once, Constraint)
    assert at_once.after is None


async def forced(subject: Rig, *tools: dict[str, Any]) -> ToolCallDelta:
    sampling = SamplingRequest(temperature=1.0, seed=1)
    request = chat_request(
        "go",
        tools=tools,
        tool_choice=ToolChoice(mode="required"),
        sampling=sampling,
        max_tokens=1000,
    )
    (made,) = (await subject.run(request)).calls
    return made


def test_a_forced_call_keeps_to_a_schema_that_refers_to_its_own_parts(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    async def test() -> None:
        async with rig(model_folder(ModelSpec(template="tools"))) as subject:
            made = await forced(subject, declared(NESTED), declared(NESTED))
            arguments = json.loads(made.arguments)
            assert isinstance(arguments["flag"]["on"], bool)
            assert set(arguments) <= {"flag", "more"}

    run_async(test())


def test_a_forced_call_keeps_to_what_can_be_enforced_of_a_loose_schema(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    async def test() -> None:
        async with rig(model_folder(ModelSpec(template="tools"))) as subject:
            made = await forced(subject, declared(GENERATED))
            arguments = json.loads(made.arguments)
            assert list(arguments) == ["n"]
            assert arguments["n"] <= 9
            with pytest.raises(RequestError) as caught:
                await forced(subject, declared(GENERATED, strict=True))
            assert caught.value.param == "tools"

    run_async(test())


def test_what_only_describes_is_passed_over_and_formats_of_note_hold(full_model: Path) -> None:
    schema = {
        "type": "array",
        "description": "x" * (300 << 10),
        "prefixItems": [
            {"type": "string", "format": "path", "maxLength": 3},
            {"type": "string", "format": "date"},
        ],
        "items": False,
        "minItems": 2,
    }

    async def test() -> None:
        async with rig(full_model) as subject:
            answer = await subject.run(
                constrained(JsonSchemaFormat(schema=schema), 1, max_tokens=400)
            )
            assert answer.end.finish_reason == "stop"
            path, date = json.loads(answer.text)
            assert len(path) <= 3
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)

    run_async(test())


def test_a_schema_that_is_not_strict_holds_as_far_as_it_can(full_model: Path) -> None:
    schema = {"type": "array", "items": {"enum": [3, 14]}, "maxItems": 3, "uniqueItems": True}

    async def test() -> None:
        async with rig(full_model) as subject:
            loose = JsonSchemaFormat(schema=schema, strict=False)
            answer = await subject.run(constrained(loose, 1, max_tokens=200))
            assert answer.end.finish_reason == "stop"
            assert set(json.loads(answer.text)) <= {3, 14}
            with pytest.raises(RequestError):
                await subject.run(constrained(JsonSchemaFormat(schema=schema), 1))

    run_async(test())


# Spaced as the declarations of the tools are not, which the parrot would go on with otherwise.
CALL = '<tool_call>\n{ "name" : "add" , "arguments" : { "a" : true } }\n</tool_call>'


def test_a_model_that_must_answer_in_json_may_call_its_tools_instead(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(kind="parrot", context=8192, template="tools"))

    async def test() -> None:
        async with rig(folder) as subject:

            async def say(text: str, **fields: Any) -> Answer:
                return await subject.run(
                    chat_request(text, tools=TOOLS, response_format=VERDICT, **fields)
                )

            (made,) = (called := await say(CALL, max_tokens=200)).calls
            assert (made.name, json.loads(made.arguments)) == ("add", {"a": True})
            assert called.end.finish_reason == "tool_calls"
            single = ToolChoice(at_most_one=True)
            (only,) = (
                one := await say(f"{CALL}\n{CALL}", tool_choice=single, max_tokens=400)
            ).calls
            assert json.loads(only.arguments) == {"a": True}
            assert one.end.finish_reason == "tool_calls"
            assert one.end.completion_tokens < 1.5 * called.end.completion_tokens
            verdict = await say('{"ok": true, "reason": "x"}', max_tokens=100)
            check_verdict(verdict.text)
            assert not verdict.calls
            never = await say(CALL, tool_choice=ToolChoice(mode="none"), max_tokens=200)
            assert not never.calls
            assert never.text.startswith("{")

    run_async(test())


@pytest.mark.parametrize("closing", ["</calls>", ""], ids=["closed", "to the end"])
def test_calls_between_markers_that_are_mere_text_may_be_the_answer(
    full_model: Path, closing: str
) -> None:
    vocabulary = from_tokenizer(load_tiny(full_model).tokenizer._tokenizer)
    grammar = json_answer_or_calls({"type": "object"}, Marker("[CALLS]"), Marker(closing))

    def is_whole(text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        return matcher.consume_tokens(vocabulary.tokenize_str(text)) and matcher.is_accepting()

    assert is_whole("{}")
    assert is_whole(f"[CALLS]f[ARGS]{{}}{closing}")
    assert is_whole(f"[CALLS]a/b{closing}\n[CALLS]c{closing}")
    assert not is_whole("[CALLS")
    assert not is_whole("Well, [CALLS]f")
    assert is_whole("[CALLS]f") is not bool(closing)
