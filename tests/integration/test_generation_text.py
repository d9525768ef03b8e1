"""What a completion's text is: stops, lengths, characters, logprobs, reasoning, tool calls."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_isolate_engine.completion.request import SamplingRequest
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_engine.generation.vocabulary import Vocabulary
from tests.integration.generation_rig import (
    chat_request,
    load_tiny,
    rig,
    run_async,
    text_request,
    tokens_request,
)
from tests.material.models import ModelSpec
from tests.material.tokenizer import VOCAB_SIZE

SENTENCE = "the code word is hello, and 日本語 👩‍💻 ďábel 🇨🇿 שלום for you."


def test_a_stop_string_ends_the_text_before_it_wherever_it_lies(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            whole = await subject.run(text_request("hello world", max_tokens=30))
            assert len(whole.text) > 30
            for start in range(0, 24, 3):
                for length in (1, 2, 5):
                    stop = whole.text[start : start + length]
                    cut = await subject.run(
                        text_request("hello world", max_tokens=30, stop=(stop, "\x00never"))
                    )
                    assert cut.text == whole.text[: whole.text.index(stop)]
                    assert cut.end.finish_reason == "stop"
                    assert cut.end.stop_string == stop

    run_async(test())


@pytest.mark.case("31")
def test_a_length_cut_says_length_and_counts_exactly(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            for count in (1, 2, 5):
                answer = await subject.run(text_request("hello", max_tokens=count))
                assert answer.end.finish_reason == "length"
                assert answer.end.completion_tokens == count
                assert len(answer.deltas) == count

    run_async(test())


def test_an_answer_that_ends_by_itself_says_stop(parrot_model: Path) -> None:
    async def test() -> None:
        async with rig(parrot_model) as subject:
            answer = await subject.run(chat_request(SENTENCE, max_tokens=400))
            assert answer.text == SENTENCE
            assert answer.end.finish_reason == "stop"
            prompt = subject.loaded.tokenizer.encode(SENTENCE, add_special_tokens=False)
            assert answer.end.completion_tokens == len(prompt) + 1  # and the end token

    run_async(test())


def test_only_the_start_of_an_answer_loses_the_space_that_marks_it(
    parrot_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationThread, "marks_start_with_space", True)
    said = " one two three four"

    async def test() -> None:
        async with rig(parrot_model) as subject:
            begun = await subject.run(chat_request("say it", said, "say it", max_tokens=40))
            assert begun.text == said[1:]
            go_on = {"continue_final_message": True}
            rest = await subject.run(
                chat_request("say it", said, "say it", " one two", template_kwargs=go_on)
            )
            assert rest.text == " three four"

    run_async(test())


@pytest.mark.case("32")
@pytest.mark.parametrize("count", range(1, 26))
def test_a_length_cut_splits_no_character(parrot_model: Path, count: int) -> None:
    text = "日本語 👩‍💻 ďábel 🇨🇿 🏳️‍🌈 שלום"

    async def test() -> None:
        async with rig(parrot_model) as subject:
            answer = await subject.run(chat_request(text, max_tokens=count))
            whole = answer.text.removesuffix("\ufffd")
            assert text.startswith(whole)
            assert len(whole.encode()) <= count
            assert all("\ufffd" not in delta for delta in answer.deltas[:-1])

    run_async(test())


@pytest.mark.case("32")
@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_give_the_text_that_their_bytes_mean(full_model: Path, seed: int) -> None:
    # At this temperature all 512 tokens are about equally likely: bytes, specials and merges.
    sampling = SamplingRequest(temperature=1000.0, seed=seed)

    async def test() -> None:
        async with rig(full_model) as subject:
            requests = [
                tokens_request([65, 66 + number], max_tokens=40, sampling=sampling, top_logprobs=0)
                for number in range(10)
            ]
            for answer in await asyncio.gather(*map(subject.run, requests)):
                raw = b"".join(logprob.raw for logprob in answer.logprobs)
                assert answer.text == raw.decode("utf-8", "replace")
                answer.text.encode()  # no lone surrogate

    run_async(test())


def test_vocabulary_bytes_are_those_that_the_tokenizer_decodes(full_model: Path) -> None:
    tokenizer = load_tiny(full_model).tokenizer
    vocabulary = Vocabulary(tokenizer)
    for token in range(VOCAB_SIZE):
        assert vocabulary.raw(token).decode("utf-8", "replace") == tokenizer.decode([token])
    assert vocabulary.raw(VOCAB_SIZE + 5) == b""


@pytest.mark.case("43")
def test_logprobs_are_ordered_and_cover_the_content(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            for top in (0, 1, 5, 20):
                answer = await subject.run(
                    text_request("hello", max_tokens=12, top_logprobs=top, stop=("zzzz",))
                )
                assert b"".join(p.raw for p in answer.logprobs) == answer.text.encode()
                for logprob in answer.logprobs:
                    values = [other.logprob for other in logprob.top]
                    assert len(values) == top
                    assert values == sorted(values, reverse=True)
                    assert all(value <= 0 for value in [*values, logprob.logprob])
                    if top:  # greedy: the token is the best one
                        assert logprob.top[0].raw == logprob.raw
                        assert logprob.logprob == pytest.approx(values[0])

    run_async(test())


def test_logprobs_do_not_change_the_text(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            plain = await subject.run(text_request("hello", max_tokens=30))
            noted = await subject.run(text_request("hello", max_tokens=30, top_logprobs=3))
            assert plain.text == noted.text
            assert plain.logprobs == []

    run_async(test())


def test_reasoning_comes_apart_and_the_rest_is_content(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(kind="parrot", template="thinking", context=8192))

    async def test() -> None:
        async with rig(folder) as subject:
            answer = await subject.run(
                chat_request("<think>why is that</think>so it is", max_tokens=100)
            )
            assert (answer.reasoning, answer.text) == ("why is that", "so it is")
            assert answer.end.finish_reason == "stop"
            assert 0 < answer.end.reasoning_tokens < answer.end.completion_tokens

    run_async(test())


@pytest.mark.case("34")
def test_tool_calls_of_the_model_become_calls(model_folder: Callable[[ModelSpec], Path]) -> None:
    folder = model_folder(ModelSpec(kind="parrot", template="tools", context=8192))
    tools = ({"adds": "two numbers"},)  # worded unlike the call, which the parrot repeats
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'

    async def test() -> None:
        async with rig(folder) as subject:
            request = chat_request(f"first this: {call}", tools=tools, max_tokens=200)
            answer = await subject.run(request)
            assert answer.text == "first this: "
            (made,) = answer.calls
            assert (made.index, made.name) == (0, "add")
            assert json.loads(made.arguments) == {"a": 12, "b": 7}
            assert answer.end.finish_reason == "tool_calls"
            short = await subject.run(
                chat_request(f"first this: {call}", tools=tools, max_tokens=40)
            )
            assert short.calls == []
            assert f"first this: {call}".startswith(short.text)
            assert "<tool_call>" in short.text
            assert short.end.finish_reason == "length"

    run_async(test())


@pytest.mark.case("34")
def test_arguments_of_tool_calls_are_streamed_and_join_to_the_whole(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    folder = model_folder(ModelSpec(kind="parrot", template="tools", context=8192))
    tools = ({"adds": "two numbers"},)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'

    async def test() -> None:
        async with rig(folder) as subject:
            answers = [
                await subject.run(
                    chat_request(f"first this: {call}", tools=tools, max_tokens=200, stream=stream)
                )
                for stream in (True, False)
            ]
            first, *others = answers[0].calls
            assert len(others) > 5
            assert (first.index, first.name) == (0, "add")
            (whole,) = answers[1].calls
            assert "".join(part.arguments for part in answers[0].calls) == whole.arguments
            assert answers[0].end.finish_reason == "tool_calls"

    run_async(test())


def test_joined_deltas_are_the_same_in_company(parrot_model: Path) -> None:
    async def test() -> None:
        async with rig(parrot_model) as subject:
            texts = [f"{SENTENCE} number {number} of them." for number in range(6)]
            requests = [chat_request(text, max_tokens=400) for text in texts]
            answers = await asyncio.gather(*map(subject.run, requests))
            assert [answer.text for answer in answers] == texts

    run_async(test())
