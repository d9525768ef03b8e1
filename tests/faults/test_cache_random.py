"""Whatever is asked, cut off, evicted, flushed and reopened, in any order: the answers of no cache.

A seeded random walk over one prompt cache and its directory. Every answer is compared with that of
an engine without a prompt cache, which was asked the same alone.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.completion.events import Event
from mlx_isolate_engine.completion.request import CompletionRequest, SamplingRequest
from tests.integration.generation_rig import Rig, rig, run_async, tokens_request
from tests.material.models import (
    CACHE_KINDS,
    FULL,
    NO_KV_BITS_ON_CUDA,
    QUANTIZABLE,
    ModelSpec,
)

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
STEP = WINDOW = 16
SEED = 1
SESSIONS, ACTS = 3, 14
SPECS = {**CACHE_KINDS, "quantized": QUANTIZABLE, "draft": FULL}
QUANTIZED = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 20}
USUAL = {("sliding", 4), ("quantized", 1)}


def marks_of(kind: str, rows: int) -> list[pytest.MarkDecorator]:
    rare = [] if (kind, rows) in USUAL else [pytest.mark.slow]
    return rare + [pytest.mark.not_on_cuda(NO_KV_BITS_ON_CUDA)] * (kind == "quantized")


CASES = [
    pytest.param(kind, rows, marks=marks_of(kind, rows))
    for kind in SPECS
    for rows in (1, 4)
    if rows == 1 or kind not in ("quantized", "draft")
]
GREEDY = SamplingRequest(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    GREEDY,
    SamplingRequest(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingRequest(temperature=0.8, seed=7, top_p=0.9),
)


def prompts(source: random.Random) -> list[list[int]]:
    """Prompts that share beginnings of every awkward length: none, one, a window, a step, more."""

    def some(count: int) -> list[int]:
        return [source.randrange(32, 127) for _ in range(count)]

    base = some(90)
    shared = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW + 1, 47, 64, 90)
    found = [base[:length] + some(more) for length in shared for more in (1, 2, 17)]
    return found + [base[:length] for length in shared if length > 1]


class Walk:
    """One random walk; `hits` counts answers that began with something cached."""

    def __init__(self, source: random.Random, without: Rig) -> None:
        self.source = source
        self.prompts = prompts(source)
        self.without = without
        self.expected: dict[tuple[Any, ...], str] = {}
        self.hits = 0

    def request(self, count: int) -> CompletionRequest:
        prompt = self.source.choice(self.prompts)
        sampling = self.source.choice(SAMPLINGS)
        return tokens_request(prompt, max_tokens=count, sampling=sampling)

    async def check(self, warm: Rig) -> None:
        """Ask once, and compare."""
        request = self.request(self.source.choice((1, 2, 6, 20)))
        place = (request.prompt, request.sampling, request.max_tokens)
        if place not in self.expected:
            self.expected[place] = (await self.without.run(request)).text
        answer = await warm.run(request)
        assert answer.text == self.expected[place], request
        self.hits += answer.end.cached_tokens > 0
        if self.source.random() < 0.3:  # the next turn
            said = [ord(char) for char in answer.text if char.isascii()]
            self.prompts.append([*getattr(request.prompt, "tokens", ()), *said[:5], 63])

    async def cut_off(self, warm: Rig) -> None:
        """Leave after some events, or at some moment before the first."""
        after = self.source.choice((0, 1, 2, 5, 14))
        seen = 0

        async def ask() -> None:
            task = asyncio.current_task()
            assert task is not None

            async def watch(_: Event) -> None:
                nonlocal seen
                seen += 1
                if seen > after:
                    task.cancel()

            if after == 0:
                loop = asyncio.get_running_loop()
                loop.call_later(self.source.random() * 0.004, task.cancel)
            await warm.run(self.request(200), watch if after else None)

        cut = asyncio.create_task(ask())
        await self.check(warm)
        await asyncio.wait({cut})
        assert cut.cancelled() or cut.exception() is None

    async def act(self, warm: Rig, cache: PromptCache) -> None:
        """Do one thing."""
        chosen = self.source.random()
        if chosen < 0.45:
            await self.check(warm)
        elif chosen < 0.6:
            await asyncio.gather(*(self.check(warm) for _ in range(3)))
        elif chosen < 0.85:
            await self.cut_off(warm)
        elif chosen < 0.95:
            await asyncio.to_thread(cache.flush, 20)
            cache.trim_to(0)
        else:
            await asyncio.to_thread(cache.clear)


def _always(cache: PromptCache) -> Callable[[object], PromptCache]:
    return lambda _: cache


@pytest.mark.case("06", "08")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_a_random_walk_gives_the_answers_of_no_cache(
    kind: str, rows: int, model_folder: Callable[[ModelSpec], Path], tmp_path: Path
) -> None:
    source = random.Random(f"{SEED} {kind} {rows}")
    folder = model_folder(SPECS[kind])
    settings: dict[str, Any] = {
        "decode_concurrency": rows,
        "prompt_concurrency": rows,
        "prefill_step_size": STEP,
        **(QUANTIZED if kind == "quantized" else {}),
    }
    if kind == "draft":
        settings["draft"] = model_folder(ModelSpec(kind="full", layers=2, seed=5))

    def new_cache() -> PromptCache:
        bytes_max = source.choice((1 << 30, 3_000_000))
        store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=bytes_max, verify=True)
        store.open()
        cold = ColdSettings(
            tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28, debounce_s=0.0
        )
        return PromptCache(entries_max=source.choice((2, 60)), bytes_max=None, cold=cold)

    async def main() -> None:
        async with rig(folder, **settings) as without:
            walk = Walk(source, without)
            for _ in range(SESSIONS):
                cache = new_cache()
                async with rig(folder, make_prompt_cache=_always(cache), **settings) as warm:
                    for _ in range(ACTS):
                        await walk.act(warm, cache)
                    await warm.wait_idle()
                    await asyncio.to_thread(cache.close, 20)
            assert walk.hits > SESSIONS * ACTS // 4, "no hits, so this proves nothing"

    run_async(main(), deadline_s=500)
