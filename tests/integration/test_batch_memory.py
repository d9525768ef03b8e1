"""Memory of a batch whose rows come from the prompt cache: measured, and what admission allows."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlx_isolate_engine.cache.prompt_cache import ColdSettings, PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.generation.memory import KV_SHARE, padded_tokens_max
from tests.integration.generation_rig import rig, run_async, tokens_request
from tests.material.models import CACHE_LIST, FULL, RECURRENT, SHARED_KV, SLIDING, ModelSpec

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
ROWS, LENGTH = 4, 1400
# A step's intermediate results, and what MLX rounds up.
SLACK = 2 << 20
Folder = Callable[[ModelSpec], Path]


def prompts() -> list[list[int]]:
    """Of about one length, none of which begins like another."""
    return [[40 + row, *(33 + at % 90 for at in range(LENGTH - row))] for row in range(ROWS)]


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_rows_from_the_prompt_cache_take_what_admission_counts(
    tier: str, model_folder: Folder, tmp_path: Path
) -> None:
    """While a batch is put together, its rows lie beside it: twice rows by the longest row.

    Admission lets rows in up to KV_SHARE of what is free, so that both fit.
    """
    assert KV_SHARE <= 0.5
    store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 34)
    store.open()
    cold = ColdSettings(
        tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 33, debounce_s=0.0
    )
    cache = PromptCache(entries_max=50, bytes_max=None, cold=cold)
    settings: dict[str, Any] = {
        "decode_concurrency": ROWS,
        "prompt_concurrency": ROWS,
        "prefill_step_size": 256,
    }

    async def main() -> None:
        async with rig(
            model_folder(FULL), make_prompt_cache=lambda _: cache, **settings
        ) as running:
            for prompt in prompts():
                await running.run(tokens_request(prompt, max_tokens=1))
            await running.wait_idle()
            assert (await asyncio.to_thread(cache.flush, 60)).durable
            row = cache.figures().ram_bytes // ROWS
            assert cache.figures().ram_entries == ROWS
            if tier == "ssd":
                cache.trim_to(0)
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            requests = [tokens_request(prompt, max_tokens=16) for prompt in prompts()]
            answers = await asyncio.gather(*(running.run(each) for each in requests))
            peak = mx.get_peak_memory() - before
            for answer in answers:
                assert answer.end.timings.cache_tier == tier
                assert answer.end.cached_tokens >= answer.end.prompt_tokens - 1
            assert ROWS * row // 2 < peak <= 2 * ROWS * row + SLACK

    run_async(main())
    cache.close(10)


@pytest.mark.parametrize(
    ("spec", "grows"),
    [(FULL, True), (SLIDING, True), (CACHE_LIST, True), (SHARED_KV, True), (RECURRENT, False)],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_every_kind_of_cache_that_grows_is_budgeted(
    spec: ModelSpec, grows: bool, model_folder: Folder
) -> None:
    model = load_model(model_folder(spec))[0]
    assert (padded_tokens_max(model) is not None) == grows
