"""The serial lane: mlx-lm's single-row path with reuse, cancellation and KV quantization."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import ContentDelta, Event, PrefillProgress
from mlx_isolate_engine.completion.request import SamplingRequest
from mlx_isolate_engine.generation import sampling
from mlx_isolate_engine.generation.suitability import warm_up
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError, EngineError
from tests.integration.generation_rig import (
    Rig,
    TinyLoaded,
    chat_request,
    load_tiny,
    rig,
    run_async,
    text_request,
    tokens_request,
)
from tests.material.models import (
    CACHE_LIST,
    FULL,
    HYBRID,
    NO_KV_BITS_ON_CUDA,
    RECURRENT,
    SHARED_KV,
    SLIDING,
    ModelSpec,
    printable_ids,
)

TOKENS = 24
SERIAL: dict[str, Any] = {"decode_concurrency": 1}


def new_cache(_: object) -> PromptCache:
    return PromptCache(entries_max=20, bytes_max=None)


def random_prompt(seed: int, length: int = 60) -> list[int]:
    return random.Random(seed).choices(printable_ids(), k=length)


def load_with_texts(
    prompts: list[list[int]], texts: list[str], **options: Any
) -> Callable[[Path], TinyLoaded]:
    """A loader that also fills `texts` with mlx-lm's own greedy answers."""

    def load(folder: Path) -> TinyLoaded:
        loaded = load_tiny(folder)
        for prompt in prompts:
            steps = generate_step(mx.array(prompt), loaded.model, max_tokens=TOKENS, **options)
            texts.append(loaded.tokenizer.decode([int(token) for token, _ in steps]))
        return loaded

    return load


async def texts_of(subject: Rig, prompts: list[list[int]]) -> list[str]:
    answers = [await subject.run(tokens_request(p, max_tokens=TOKENS)) for p in prompts]
    assert {answer.end.timings.placement for answer in answers} == {"serial"}
    return [answer.text for answer in answers]


@pytest.mark.parametrize(
    "spec", [FULL, SLIDING, RECURRENT, HYBRID, CACHE_LIST, SHARED_KV], ids=lambda spec: spec.kind
)
def test_serial_answers_equal_mlx_lm_cold_and_warm(
    spec: ModelSpec, model_folder: Callable[[ModelSpec], Path]
) -> None:
    first = random_prompt(1)
    prompts = [first, first + random_prompt(2, 20), first + random_prompt(3, 9), first]
    texts: list[str] = []

    async def test() -> None:
        load = load_with_texts(prompts, texts)
        async with rig(
            model_folder(spec), load=load, make_prompt_cache=new_cache, **SERIAL
        ) as subject:
            assert await texts_of(subject, prompts) == texts
            again = await subject.run(tokens_request(prompts[1], max_tokens=3))
            assert again.end.cached_tokens == len(prompts[1]) - 1

    run_async(test())


def test_penalties_are_the_same_warm_as_cold(full_model: Path) -> None:
    sampling = SamplingRequest(repetition_penalty=1.7, repetition_context_size=200)
    request = tokens_request(random_prompt(4) * 2, max_tokens=TOKENS, sampling=sampling)

    async def test() -> None:
        async with rig(full_model, make_prompt_cache=new_cache, **SERIAL) as subject:
            cold, warm = await subject.run(request), await subject.run(request)
            assert (cold.end.cached_tokens, warm.end.cached_tokens) == (0, 119)
            assert cold.text == warm.text
        async with rig(full_model) as batched:
            assert (await batched.run(request)).text == cold.text

    run_async(test())


@pytest.mark.not_on_cuda(NO_KV_BITS_ON_CUDA)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("start", [0, 40])
def test_kv_bits_answer_as_mlx_lms_kv_bits(
    model_folder: Callable[[ModelSpec], Path], bits: int, start: int
) -> None:
    folder = model_folder(ModelSpec(kind="full", hidden=128))
    options: dict[str, Any] = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    prompts = [random_prompt(5), random_prompt(6)]
    texts: list[str] = []

    async def test() -> None:
        load = load_with_texts(prompts, texts, **options)
        async with rig(folder, load=load, make_prompt_cache=new_cache, **options) as subject:
            assert await texts_of(subject, prompts) == texts
            assert await texts_of(subject, prompts) == texts
            plain: list[str] = []
        async with rig(folder, load=load_with_texts(prompts, plain)) as _:
            assert plain != texts  # quantization was on

    run_async(test())


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SLIDING, {"kv_bits": 8, "kv_group_size": 32}),
        (RECURRENT, {"kv_bits": 8, "kv_group_size": 32}),
        (FULL, {"kv_bits": 7, "kv_group_size": 32}),
        (FULL, {"kv_bits": 8, "kv_group_size": 128}),
    ],
)
def test_kv_bits_that_cannot_work_refuse_the_start(
    model_folder: Callable[[ModelSpec], Path], spec: ModelSpec, options: dict[str, Any]
) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="--kv-"):
            async with rig(model_folder(spec), **options):
                pass

    run_async(test())


def test_a_scheme_that_the_device_cannot_compute_is_told_at_the_load(
    model_folder: Callable[[ModelSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("[quantized_matmul] No implementation for problem shape")

    model = load_tiny(model_folder(ModelSpec(kind="full", hidden=128))).model
    monkeypatch.setattr(mx, "quantized_matmul", no_kernel)
    with pytest.raises(ConfigError, match=r"--kv-bits 8 .* No implementation .* Leave it out"):
        warm_up(model, EngineSettings(kv_bits=8, kv_group_size=32))
    assert warm_up(model, EngineSettings()) > 0


@pytest.mark.case("09")
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_completion_leaves_every_phase_of_the_serial_lane(
    slow_model: Path, phase: str
) -> None:
    async def test() -> None:
        async with rig(slow_model, make_prompt_cache=new_cache, **SERIAL) as subject:
            reached = asyncio.Event()

            async def watch(event: Event) -> None:
                if isinstance(event, PrefillProgress if phase == "prefill" else ContentDelta):
                    reached.set()

            prompt = random_prompt(7, 3000 if phase == "prefill" else 5)
            first = asyncio.create_task(
                subject.run(tokens_request(prompt, max_tokens=20000), watch)
            )
            await reached.wait()
            second = asyncio.create_task(subject.run(text_request("x", max_tokens=3)))
            if phase == "queued":
                third = asyncio.create_task(subject.run(text_request("y", max_tokens=3)))
                await asyncio.sleep(0)
                third.cancel()
            first.cancel()
            assert (await second).end.completion_tokens == 3
            await subject.wait_idle()
            assert subject.thread.counters.cancelled >= 1
            if phase == "prefill":  # what had run is worth keeping
                again = await subject.run(tokens_request(prompt[:200], max_tokens=1))
                assert again.end.cached_tokens > 0

    run_async(test())


def test_a_stalled_reader_lets_the_next_one_run(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model, stall_buffer_bytes=2000, **SERIAL) as subject:
            request = text_request("hello", max_tokens=200)
            alone = await subject.run(request)
            go_on = asyncio.Event()

            async def watch(event: Event) -> None:
                if isinstance(event, ContentDelta):
                    await go_on.wait()

            stalled = asyncio.create_task(subject.run(request, watch))
            beside = await subject.run(text_request("other", max_tokens=30))
            assert beside.end.completion_tokens == 30
            go_on.set()
            assert (await stalled).text == alone.text
            await subject.wait_idle()

    run_async(test())


def test_a_broken_row_of_the_serial_lane_fails_alone(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise LookupError("broken")

    monkeypatch.setattr(sampling, "keep_top_k", fail)

    async def test() -> None:
        async with rig(full_model, **SERIAL) as subject:
            bad = text_request("x", sampling=SamplingRequest(temperature=1.0, top_k=13))
            with pytest.raises(EngineError):
                await subject.run(bad)
            good = await subject.run(text_request("x", max_tokens=3))
            assert good.end.completion_tokens == 3
            await subject.wait_idle()

    run_async(test())


def test_a_chat_ends_by_itself_in_the_serial_lane(parrot_model: Path) -> None:
    async def test() -> None:
        async with rig(parrot_model, **SERIAL) as subject:
            answer = await subject.run(chat_request("the code word is hello.", max_tokens=90))
            assert answer.text == "the code word is hello."
            assert answer.end.finish_reason == "stop"
            stopped = await subject.run(
                chat_request("the code word is hello.", max_tokens=90, stop=("word",))
            )
            assert (stopped.text, stopped.end.stop_string) == ("the code ", "word")

    run_async(test())


def test_answers_with_a_draft_model_are_those_without(
    model_folder: Callable[[ModelSpec], Path], parrot_model: Path
) -> None:
    folder = model_folder(FULL)
    prompts = [random_prompt(8), random_prompt(9), random_prompt(8) + random_prompt(10, 7)]
    prompts.append(prompts[0])
    texts: list[str] = []

    async def test() -> None:
        for draft in (folder, model_folder(ModelSpec(kind="full", seed=5))):
            texts.clear()
            load = load_with_texts(prompts, texts)
            async with rig(folder, load=load, draft=draft, make_prompt_cache=new_cache) as subject:
                assert await texts_of(subject, prompts) == texts
                again = await subject.run(tokens_request(prompts[2], max_tokens=TOKENS))
                timings = again.end.timings
                assert again.text == texts[2]
                assert timings.cache_n == len(prompts[2]) - 1
                assert timings.draft_n > 0
                if draft == folder:  # the model itself proposes what it would have said
                    assert timings.draft_n_accepted == timings.draft_n
                else:
                    assert timings.draft_n_accepted < timings.draft_n / 2
                noted = await subject.run(
                    tokens_request(prompts[0], max_tokens=TOKENS, top_logprobs=1)
                )
                assert (noted.text, noted.end.timings.draft_n) == (texts[0], 0)
                stopped = await subject.run(
                    tokens_request(prompts[1], max_tokens=TOKENS, stop=(texts[1][9:12],))
                )
                assert stopped.text == texts[1][: texts[1].index(texts[1][9:12])]
                assert await texts_of(subject, prompts) == texts
                await subject.wait_idle()

    run_async(test())


def test_a_draft_model_that_would_answer_wrongly_refuses_the_start(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    async def test() -> None:
        for model, draft in ((SLIDING, FULL), (FULL, SLIDING), (FULL, ModelSpec(template="tools"))):
            with pytest.raises(ConfigError, match="--draft-model"):
                async with rig(model_folder(model), draft=model_folder(draft)):
                    pass

    run_async(test())
