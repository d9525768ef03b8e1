"""Calls that a model begins by itself keep to the schema of a function that is strict."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.tool_parsers import mistral

from mlx_isolate_engine.completion.constraints import overruns_of
from mlx_isolate_engine.completion.grammars import Marker, begun_call, json_answer
from mlx_isolate_engine.completion.request import SamplingRequest, ToolChoice
from mlx_isolate_engine.completion.service import NOT_STRICT
from mlx_isolate_engine.generation.constrained import CallProcessor, ConstraintProcessor
from mlx_isolate_engine.generation.plan import AwaitedMarker, CallConstraint, Constraint
from mlx_isolate_shared.errors import RequestError
from tests.integration.generation_rig import Answer, chat_request, load_tiny, rig, run_async
from tests.material.models import ModelSpec
from tests.material.schemas import GENERATED, NESTED, STRICT, TOOLS, VERDICT, declared, strict

WRONG = '<tool_call>\n{ "name" : "add" , "arguments" : { "a" : 5 } }\n</tool_call>'
ANYTHING = '<tool_call>\n{ "name" : "stop" , "arguments" : { "b" : [5] } }\n</tool_call>'


def test_a_call_that_the_model_begins_by_itself_is_held_to_a_strict_schema(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(kind="parrot", context=8192, template="tools"))

    async def test() -> None:
        async with rig(folder) as subject:

            async def say(text: str, tools: Any = STRICT, **fields: Any) -> Answer:
                return await subject.run(chat_request(text, tools=tools, max_tokens=100, **fields))

            prose = "no call, but <tool_ca>"
            said, *answers = await asyncio.gather(
                say(prose),
                say(WRONG, TOOLS),
                say(WRONG),
                say(WRONG, response_format=VERDICT),
                say(ANYTHING),
            )
            assert said.text == prose
            made = [
                (call.name, json.loads(call.arguments)) for one in answers for call in one.calls
            ]
            free, *held, other = made
            assert free == ("add", {"a": 5})
            assert [(name, type(arguments["a"])) for name, arguments in held] == [("add", bool)] * 2
            # What is not declared strict is as the model writes it.
            assert other == ("stop", {"b": [5]})
            with pytest.raises(RequestError) as caught:
                await say("hi", [declared(GENERATED, strict=True)])
            assert caught.value.param == "tools"

    run_async(test())


def test_every_call_of_a_random_model_keeps_to_its_strict_schema(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(template="tools"))

    async def test() -> None:
        async with rig(folder) as subject:
            marker = subject.thread.loaded.tokenizer.get_vocab()["<tool_call>"]
            requests = [
                chat_request(
                    "go",
                    tools=(strict(declared(NESTED)), strict(TOOLS[0])),
                    # A model of random weights begins a call as soon as it may.
                    sampling=SamplingRequest(
                        temperature=1.0, seed=seed, logit_bias={marker: 100.0}
                    ),
                    max_tokens=150,
                )
                for seed in range(4)
            ]
            answers = await asyncio.gather(*map(subject.run, requests))
            made = [call for answer in answers for call in answer.calls]
            assert len(made) >= 4
            for call in made:
                arguments = json.loads(call.arguments)
                if call.name == "add":
                    assert list(map(type, arguments.values())) == [bool]
                else:
                    assert isinstance(arguments["flag"]["on"], bool)
                    assert set(arguments) <= {"flag", "more"}

    run_async(test())


def allowed_by(processor: Any, written: str, raws: list[bytes]) -> set[bytes]:
    """What may follow a text whose characters are a token each."""
    logits = processor(mx.array([0]), mx.zeros((1, len(raws))))
    for char in written:
        logits = processor(mx.array([raws.index(char.encode())]), mx.zeros((1, len(raws))))
    return {raw for raw, logit in zip(raws, logits[0].tolist(), strict=True) if logit == 0}


def test_a_marker_that_is_written_out_begins_a_held_answer_too(full_model: Path) -> None:
    tokenizer: Any = load_tiny(full_model).tokenizer
    vocabulary = from_tokenizer(tokenizer._tokenizer)
    raws = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
    end = b"</in"
    overrun = next(raw for raw in raws if raw.startswith(b"in") and raw != b"in")
    constraint = Constraint(
        matcher=LLMatcher(vocabulary, json_answer({"const": 3}), log_level=0),
        after=AwaitedMarker(text=end, overruns=overruns_of(end, raws)),
    )

    def allowed(written: str) -> set[bytes]:
        return allowed_by(
            ConstraintProcessor(constraint, len(raws), raws.__getitem__), written, raws
        )

    for free in ("", "so ", "</", "</ </x"):
        assert allowed(free) >= {b"x", b"{", b"</in"[:1]}, free
    assert overrun in allowed("<")
    assert overrun not in allowed("so </")
    for held in ("</in", "so </</in", "</in"):
        assert allowed(held) == {b"3"}, held


def test_a_marker_that_is_written_out_opens_a_held_call_too(full_model: Path) -> None:
    tokenizer: Any = load_tiny(full_model).tokenizer
    vocabulary = from_tokenizer(tokenizer._tokenizer)
    size, opening = vocabulary.vocab_size, "[call]"
    raws = [vocabulary.decode_bytes([token]) for token in range(size)]
    grammar = begun_call([strict(TOOLS[0])["function"]], Marker("[end]"))
    constraint = CallConstraint(
        matcher=LLMatcher(vocabulary, grammar, log_level=0),
        opening=AwaitedMarker(text=opening.encode(), overruns=overruns_of(opening.encode(), raws)),
    )

    def allowed(written: str) -> set[bytes]:
        return allowed_by(CallProcessor(constraint, size, raws.__getitem__), written, raws)

    everything = set(raws)
    call = '{"name":"add","arguments":{"a":true}}'
    for free in ("", "so ", "[cal", "[call", "[[call", f"{opening}{call}[end]"):
        assert allowed(free) == everything, free
    assert {raw[:1] for raw in allowed(f"so {opening}")} <= {b"{", b"\n"}
    assert {raw[:1] for raw in allowed(f"[{opening}{call[:-6]}")} <= {
        b"t",
        b"f",
        b" ",
        b"\n",
        b"\t",
    }


def test_a_family_whose_calls_are_no_json_is_told_that_strict_is_not_enforced(
    model_folder: Callable[[ModelSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig(model_folder(ModelSpec(template="tools"))) as subject:

            async def notices(tools: Any, **fields: Any) -> tuple[str, ...]:
                prepared = await subject.service.prepare(chat_request("go", tools=tools, **fields))
                await prepared.close()
                return prepared.notices

            assert await notices(STRICT) == ()
            monkeypatch.setattr(
                subject.thread.loaded.tokenizer, "_tool_parser", mistral.parse_tool_call
            )
            assert await notices(STRICT) == (NOT_STRICT,)
            assert await notices(TOOLS) == ()
            assert await notices(STRICT, tool_choice=ToolChoice(mode="none")) == ()

    run_async(test())


def test_a_token_must_not_run_on_behind_a_marker() -> None:
    raws = [b">", b">x", b"t>", b"t>y", b"<t>z", b"a<t>", b"<t", b""]
    assert overruns_of(b"<t>", raws) == ((4,), (3,), (1,))
