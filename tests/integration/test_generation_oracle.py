"""Greedy tokens equal mlx-lm's own, for every kind of cache, alone and in a batch."""

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import ContentDelta, Event
from mlx_isolate_engine.completion.request import CompletionRequest, SamplingRequest
from tests.integration.generation_rig import Rig, chat_request, rig, run_async, tokens_request
from tests.integration.greedy_oracle import OracleRun, check_answers, load_with_oracle
from tests.material.models import (
    CACHE_LIST,
    FULL,
    HYBRID,
    RECURRENT,
    SHARED_KV,
    SLIDING,
    ModelSpec,
    printable_ids,
)

TOKENS = 30
PROMPTS = 20
KINDS = [FULL, SLIDING, RECURRENT, HYBRID, CACHE_LIST, SHARED_KV]


def random_prompts(seed: int, count: int, longest: int = 90) -> list[list[int]]:
    source = random.Random(seed)
    ids = printable_ids()
    return [source.choices(ids, k=source.randint(1, longest)) for _ in range(count)]


async def ask(subject: Rig, prompt: list[int]) -> list[int]:
    answer = await subject.run(tokens_request(prompt, max_tokens=TOKENS, top_logprobs=0))
    assert answer.end.finish_reason == "length"
    assert answer.end.prompt_tokens == len(prompt)
    by_bytes = tokens_by_bytes(subject.loaded.tokenizer)
    return [by_bytes[logprob.raw] for logprob in answer.logprobs]


@functools.lru_cache(maxsize=1)
def tokens_by_bytes(tokenizer: Any) -> dict[bytes, int]:
    return {str(tokenizer.decode([token])).encode(): token for token in printable_ids()}


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind)
def test_greedy_tokens_equal_mlx_lm_alone(
    spec: ModelSpec, model_folder: Callable[[ModelSpec], Path]
) -> None:
    prompts = random_prompts(1, 4)
    runs: list[OracleRun] = []

    async def test() -> None:
        load = load_with_oracle(prompts, TOKENS, runs)
        async with rig(model_folder(spec), load=load) as subject:
            check_answers([await ask(subject, prompt) for prompt in prompts], runs)

    run_async(test())


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind)
def test_greedy_tokens_equal_mlx_lm_eight_at_once(
    spec: ModelSpec, model_folder: Callable[[ModelSpec], Path]
) -> None:
    prompts = random_prompts(2, PROMPTS)
    runs: list[OracleRun] = []

    async def test() -> None:
        load = load_with_oracle(prompts, TOKENS, runs)
        async with rig(model_folder(spec), load=load, decode_concurrency=8) as subject:
            answers = await asyncio.gather(*(ask(subject, prompt) for prompt in prompts))
            check_answers(answers, runs)

    run_async(test())


@pytest.mark.case("06")
@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind)
def test_answers_from_a_warm_cache_equal_mlx_lm(
    spec: ModelSpec, model_folder: Callable[[ModelSpec], Path]
) -> None:
    shared = random_prompts(3, 1)[0] * 2
    prompts = [shared + tail for tail in random_prompts(4, 4, longest=20)]
    prompts += [prompts[0], prompts[1] + prompts[2]]
    runs: list[OracleRun] = []

    async def test() -> None:
        load = load_with_oracle(prompts, TOKENS, runs)
        async with rig(
            model_folder(spec),
            load=load,
            make_prompt_cache=lambda _: PromptCache(entries_max=50, bytes_max=None),
        ) as subject:
            check_answers([await ask(subject, prompt) for prompt in prompts], runs)
            again = await subject.run(tokens_request(prompts[0], max_tokens=5))
            assert again.end.cached_tokens == len(prompts[0]) - 1
            assert again.end.timings.cache_n == len(prompts[0]) - 1
            assert again.end.timings.prompt_n == 1

    run_async(test())


def test_penalties_see_the_same_history_cold_and_warm(full_model: Path) -> None:
    sampling = SamplingRequest(
        repetition_penalty=1.7,
        repetition_context_size=200,
        presence_penalty=1.0,
        presence_context_size=200,
        frequency_penalty=0.5,
        frequency_context_size=200,
    )
    prompt = random_prompts(5, 1)[0] * 2

    async def test() -> None:
        async with rig(
            full_model, make_prompt_cache=lambda _: PromptCache(entries_max=9, bytes_max=None)
        ) as subject:
            request = tokens_request(prompt, max_tokens=TOKENS, sampling=sampling)
            cold = await subject.run(request)
            warm = await subject.run(request)
            assert cold.end.cached_tokens == 0
            assert warm.end.cached_tokens == len(prompt) - 1
            assert cold.text == warm.text
            plain = await subject.run(tokens_request(prompt, max_tokens=TOKENS))
            assert plain.text != cold.text

    run_async(test())


@pytest.mark.parametrize("concurrency", [8, 1])
def test_a_system_prompt_is_shared_before_its_first_completion_has_ended(
    full_model: Path, concurrency: int
) -> None:
    system = {"role": "system", "content": "be good and " * 40}

    def ask_with(content: str, **fields: Any) -> CompletionRequest:
        return chat_request(
            messages=(system, {"role": "user", "content": content}), max_tokens=5, **fields
        )

    async def test() -> None:
        async with rig(
            full_model,
            decode_concurrency=concurrency,
            make_prompt_cache=lambda _: PromptCache(entries_max=9, bytes_max=None),
        ) as subject:
            cold = [await subject.run(ask_with(content)) for content in ("one",)]
            assert cold[0].end.cached_tokens == 0
        async with rig(
            full_model,
            decode_concurrency=concurrency,
            make_prompt_cache=lambda _: PromptCache(entries_max=9, bytes_max=None),
        ) as subject:
            speaking = asyncio.Event()

            async def watch(event: Event) -> None:
                if isinstance(event, ContentDelta):
                    speaking.set()

            first = asyncio.create_task(
                subject.run(msgspec.structs.replace(ask_with("two"), max_tokens=900), watch)
            )
            await speaking.wait()
            if concurrency == 1:
                first.cancel()
            second = await subject.run(ask_with("one"))
            assert second.end.cached_tokens > 400
            assert second.text == cold[0].text
            first.cancel()

    run_async(test())
