"""Tiny models of every kind go on after a hit exactly as after a cold prefill, from either tier."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from tests.material.models import CACHE_KINDS, NO_KV_BITS_ON_CUDA, QUANTIZABLE, ModelSpec

SPECS = {**CACHE_KINDS, "quantized": QUANTIZABLE}
KINDS = [
    *CACHE_KINDS,
    pytest.param("quantized", marks=pytest.mark.not_on_cuda(NO_KV_BITS_ON_CUDA)),
]
IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
# Longer than the window of the sliding models, so that it wraps.
PROMPT = [random.Random(7).randrange(32, 127) for _ in range(40)]
ANSWER = 8


class Lane:
    """The smallest lane: takes, prefills with a checkpoint, decodes greedily, puts."""

    def __init__(self, model: Any, cache: PromptCache | None, *, quantized: bool) -> None:
        self.model = model
        self.cache = cache
        self.quantized = quantized
        self.reused = 0

    def _fresh(self) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self.model)
        if self.quantized:
            return [part.to_quantized(group_size=32, bits=8) for part in cache]
        return cache

    def answer(self, prompt: list[int], count: int = ANSWER) -> list[int]:
        taken, self.reused = self.cache.take(prompt, "n") if self.cache else (None, 0)
        cache = taken or self._fresh()
        if self.reused < len(prompt) - 1:
            rest = mx.array([prompt[self.reused : -1]])
            mx.eval(self.model(rest, cache=cache))
        if self.cache and self.cache.wants_checkpoint(cache):
            self.cache.put(prompt[:-1], cache, "n", "prompt")
        tokens = list(prompt)
        for _ in range(count):
            logits: Any = self.model(mx.array([tokens[-1:]]), cache=cache)
            best: Any = mx.argmax(logits[0, -1])
            tokens.append(int(best.item()))
        if self.cache:
            # The model has not seen the last token; a recurrent state cannot tell by itself.
            self.cache.put(tokens[:-1], cache, "n", "assistant")
        return tokens[len(prompt) :]


Opened = Callable[[], PromptCache]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    caches: list[PromptCache] = []

    def build() -> PromptCache:
        store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 30, verify=True)
        store.open()
        choice = RestoreChoice("always")
        settings = ColdSettings(tier=store, choice=choice, spill_bytes_max=1 << 28)
        caches.append(PromptCache(entries_max=20, bytes_max=1 << 28, cold=settings))
        return caches[-1]

    yield build
    for cache in caches:
        cache.close(10)


Folder = Callable[[ModelSpec], Path]


def lane_of(folder: Folder, kind: str, cache: PromptCache | None) -> Lane:
    model, _ = load_model(folder(SPECS[kind]))
    return Lane(model, cache, quantized=kind == "quantized")


@pytest.mark.parametrize("kind", KINDS)
def test_ram_and_ssd_continue_like_a_cache_never_saved(
    kind: str, model_folder: Folder, opened: Opened
) -> None:
    cold = lane_of(model_folder, kind, None).answer(PROMPT)
    first = lane_of(model_folder, kind, opened())
    assert first.answer(PROMPT) == cold
    assert first.answer(PROMPT) == cold
    assert first.reused == len(PROMPT) - 1
    assert first.cache is not None
    assert first.cache.last_take.tier == "ram"
    assert first.cache.flush(20).durable
    restarted = lane_of(model_folder, kind, opened())
    assert restarted.answer(PROMPT) == cold
    assert restarted.reused == len(PROMPT) - 1
    assert restarted.cache is not None
    assert restarted.cache.last_take.tier == "ssd"


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_conversation_goes_on(kind: str, model_folder: Folder, opened: Opened) -> None:
    first = lane_of(model_folder, kind, opened())
    turn = [*PROMPT, *first.answer(PROMPT), 65, 66, 67, 68]
    assert first.cache is not None and first.cache.flush(20).durable
    cold = lane_of(model_folder, kind, None).answer(turn, 20)
    restarted = lane_of(model_folder, kind, opened())
    assert restarted.answer(turn, 20) == cold
    assert restarted.reused == len(PROMPT) + ANSWER - 1


def related_prompts() -> list[list[int]]:
    """Prompts that share a system prefix: strict prefixes of each other, and last-token twins."""
    system = PROMPT[:20]
    return [
        [*system, 70, 71, 72, 73],
        [*system, 70, 71, 72, 73, 74, 75],
        [*system, 70, 71, 72, 99],
        [*system[:10], 88, 89, 90],
        [*PROMPT, 70],
    ]


@pytest.mark.case("06", "x3")
@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_what_was_asked_before(
    kind: str, model_folder: Folder, opened: Opened
) -> None:
    prompts = related_prompts()
    lane = lane_of(model_folder, kind, None)
    cold = [lane.answer(prompt, 6) for prompt in prompts]
    orders = list(itertools.permutations(range(len(prompts))))
    seed = 11
    hits = 0
    for order in random.Random(seed).sample(orders, 3):
        lane.cache = opened()  # a restart: hits of the first prompts come from disk
        for number in (*order, *order):
            assert lane.answer(prompts[number], 6) == cold[number], f"seed {seed}, order {order}"
        figures = lane.cache.figures()
        hits += figures.hits
        assert figures.hits >= len(prompts)
        assert lane.cache.flush(20).durable
    assert hits > 0
    assert lane.cache is not None and lane.cache.figures().restores > 0


@pytest.mark.case("08", "x3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_off_completion_leaves_an_entry_that_is_right(
    kind: str, model_folder: Folder, opened: Opened
) -> None:
    cold = lane_of(model_folder, kind, None)
    lane = lane_of(model_folder, kind, opened())
    partial = lane.answer(PROMPT, 5)
    turn = [*PROMPT, *partial, 65, 66]
    assert lane.answer(PROMPT) == cold.answer(PROMPT)
    assert lane.answer(turn) == cold.answer(turn)
    assert lane.reused >= len(PROMPT) - 1
