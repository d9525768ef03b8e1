"""Peaks of MLX memory while entries are kept, saved, restored and written to for the first time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models.cache import KVCache

from mlx_isolate_engine.cache import snapshot
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.ram_tier import RamTier
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.device import backend_name
from tests.waiting import wait_for

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
TOKENS = 4000
HEADS, WIDTH = 4, 128
# Room for what MLX rounds up and for Python; far below one tensor.
SLACK = 2 << 20


def tensor_bytes(length: int = 4096) -> int:
    return HEADS * WIDTH * length * 4


class Entry:
    """A filled cache of so many layers, and what a step writes to it."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tokens = list(range(TOKENS))
        self.bytes = 2 * layers * tensor_bytes()

    def live(self) -> list[Any]:
        cache: list[Any] = [KVCache() for _ in range(self.layers)]
        for _ in range(0, TOKENS, 1000):
            for part in cache:
                rows = mx.random.normal((1, HEADS, 1000, WIDTH))
                part.update_and_fetch(rows, rows)
                mx.eval(part.keys, part.values)
        return cache


def step(cache: list[Any]) -> None:
    """One decode step as a model makes it: the whole graph, then one evaluation."""
    row = mx.ones((1, HEADS, 1, WIDTH))
    seen = [mx.sum(keys[..., -1, :]) for keys, _ in (c.update_and_fetch(row, row) for c in cache)]
    mx.eval(seen, [c.state for c in cache])


def tier_of(cache: PromptCache) -> str:
    return cache.last_take.tier


class Peak:
    """Peak of MLX's memory above what is active when it begins."""

    def __init__(self) -> None:
        mx.clear_cache()
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()

    @property
    def above(self) -> int:
        return mx.get_peak_memory() - self.before


@pytest.fixture(
    params=[pytest.param(4, id="64 MB"), pytest.param(17, id="272 MB", marks=pytest.mark.slow)]
)
def entry(request: pytest.FixtureRequest) -> Entry:
    return Entry(request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PromptCache]:
    store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 34)
    store.open()
    cold = ColdSettings(tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 33)
    made = PromptCache(entries_max=4, bytes_max=1 << 33, cold=cold)
    yield made
    made.close(30)


def test_keeping_saving_restoring_and_the_first_steps_hold_their_bounds(
    entry: Entry, cache: PromptCache
) -> None:
    live = entry.live()
    tensor = tensor_bytes()

    peak = Peak()
    cache.put(entry.tokens, live, "n", "assistant")
    assert peak.above <= SLACK, "an entry with room to grow is adopted, not copied"
    del live

    peak = Peak()
    resident = psutil.Process().memory_info().rss
    assert cache.flush(120).durable
    assert peak.above <= SLACK, "a save copies nothing"
    # What the host reads of CUDA's memory is moved to the host's: each tensor, and none twice.
    moved = entry.bytes if backend_name() == "cuda" else 0
    assert psutil.Process().memory_info().rss - resident <= moved + tensor + (16 << 20)

    peak = Peak()
    taken, reused = cache.take([*entry.tokens, 1], "n")
    assert taken is not None and reused == TOKENS
    assert tier_of(cache) == "ram"
    assert peak.above <= SLACK, "a hit in RAM copies nothing by itself"
    step(taken)
    assert peak.above <= entry.bytes + 2 * tensor + SLACK, "the first step moves the rows once"
    del taken

    cache.trim_to(0)
    peak = Peak()
    taken, reused = cache.take([*entry.tokens, 1], "n")
    assert taken is not None and reused == TOKENS
    assert tier_of(cache) == "ssd"
    assert peak.above <= entry.bytes + tensor + SLACK
    buffers = [c.keys.shape for c in taken]
    step(taken)
    assert peak.above <= entry.bytes + tensor + SLACK, "the first step writes in place"
    assert [c.keys.shape for c in taken] == buffers
    del taken
    mx.clear_cache()


def test_what_is_demoted_leaves_the_process(tmp_path: Path) -> None:
    store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 34)
    store.open()
    cold = ColdSettings(tier=store, choice=RestoreChoice("always"), demote_idle_s=0.05)
    made = PromptCache(entries_max=4, bytes_max=1 << 33, cold=cold)
    nothing = mx.get_active_memory()
    try:
        entry = Entry(1)
        made.put(entry.tokens, entry.live(), "n", "assistant")
        assert made.flush(120).durable
        wait_for(lambda: mx.get_active_memory() <= nothing + SLACK, 10, "it has left RAM")
        wait_for(lambda: mx.get_cache_memory() == 0, 10, "its buffers are given back")
    finally:
        made.close(30)


def batch_rows(heads: int) -> list[Any]:
    """Row 2 of a batch of 8, as BatchGenerator hands it out: lazy, exact length."""
    row: list[Any] = []
    for _ in range(4):
        keys = mx.random.normal((8, heads, 1024, WIDTH))
        mx.eval(keys)
        part = KVCache()
        part.keys = mx.contiguous(keys[2:3, :, :1000])
        part.values = mx.contiguous(keys[3:4, :, :1000])
        part.offset = 1000
        row.append(part)
    return row


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_batch_row_is_kept_alone_and_with_one_tensor_to_spare(heads: int) -> None:
    cache = PromptCache(entries_max=4, bytes_max=1 << 33)
    mx.clear_cache()
    nothing = mx.get_active_memory()
    row = batch_rows(heads)
    size = 8 * heads * 1000 * WIDTH * 4
    peak = Peak()
    cache.put(list(range(1000)), row, "n", "assistant")
    assert cache.figures().ram_bytes == size
    assert peak.above <= size + size // 8 + SLACK
    del row
    mx.clear_cache()
    assert mx.get_active_memory() - nothing <= size + SLACK, "the batch is still held"


@pytest.mark.parametrize("rounded", [0, 16 << 10])
def test_a_row_is_copied_once_where_buffers_are_rounded(
    rounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's allocator rounds every buffer up to a page; twelve of them are kept together."""
    copied: list[Any] = []
    monkeypatch.setattr(snapshot, "own_copy", copied.append)
    figures = iter((0, 12 * (700 * WIDTH * 8 + rounded)))
    monkeypatch.setattr(mx, "get_active_memory", lambda: next(figures))
    batch = [mx.zeros((2, 4, 800, WIDTH), dtype=mx.bfloat16) for _ in range(12)]
    row = [KVCache() for _ in range(6)]
    for layer, (keys, values) in zip(row, zip(batch[::2], batch[1::2], strict=True), strict=True):
        layer.keys, layer.values = (mx.contiguous(a[:1, :, :700]) for a in (keys, values))
        layer.offset = 700
    snapshot.keep(row, 700)
    assert not copied


@pytest.mark.case("26")
def test_the_byte_cap_bounds_what_distinct_prompts_leave_behind(tmp_path: Path) -> None:
    cap = 8 << 20
    made = PromptCache(entries_max=1000, bytes_max=cap)
    before = mx.get_active_memory()
    for number in range(60):
        part = KVCache()
        rows = mx.random.normal((1, HEADS, 256, WIDTH))
        part.update_and_fetch(rows, rows)
        mx.eval(part.keys, part.values)
        made.put([number, *range(255)], [part], "n", "assistant")
        del part, rows
        assert made.figures().ram_bytes <= cap
    mx.clear_cache()
    assert mx.get_active_memory() - before <= cap + SLACK


@pytest.mark.case("26")
def test_figures_never_show_an_insertion_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    part = KVCache()
    rows = mx.ones((1, 1, 256, 16))
    part.update_and_fetch(rows, rows)
    mx.eval(part.keys, part.values)
    assert part.keys is not None and part.values is not None
    size = part.keys.nbytes + part.values.nbytes
    made = PromptCache(entries_max=1000, bytes_max=size)
    seen: list[int] = []
    lookers: list[threading.Thread] = []
    evict = RamTier._evict  # pyright: ignore[reportPrivateUsage]

    def evict_seen(tier: RamTier) -> list[Any]:
        looker = threading.Thread(target=lambda: seen.append(made.figures().ram_bytes))
        lookers.append(looker)
        looker.start()
        # It has read by then, unless it rightly waits for the end of the insertion.
        looker.join(0.2)
        return evict(tier)

    monkeypatch.setattr(RamTier, "_evict", evict_seen)
    for number in range(3):
        made.put([number, *range(255)], [part], "n", "assistant")
    for looker in lookers:
        looker.join()
    assert seen == [size] * 3
