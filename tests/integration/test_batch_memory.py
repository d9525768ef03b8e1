"""Memory of a batch: measured while rows join, run, grow and leave, and what admission allows."""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.snapshot import arrays_of
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.device import backend_name
from mlx_isolate_engine.generation import layerwise
from mlx_isolate_engine.generation.admission import CAPACITY_STEP
from mlx_isolate_engine.generation.batch_model import BatchModel
from mlx_isolate_engine.generation.layerwise import LayerwiseGenerator
from mlx_isolate_engine.generation.memory import KV_SHARE, room_for_rows
from tests.integration.generation_rig import rig, run_async, tokens_request
from tests.material.models import (
    CACHE_LIST,
    FULL,
    HYBRID,
    RECURRENT,
    SHARED_KV,
    SLIDING,
    ModelSpec,
)

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
ROWS, LENGTH = 4, 1400
# A step's intermediate results, and what MLX rounds up.
SLACK = 2 << 20
Folder = Callable[[ModelSpec], Path]


def beside(batch: int, layers: int) -> int:
    """Bytes that a batch of so many may need beside itself.

    Two layers. On CUDA MLX holds what a pass has read and written until its kernels have run and a
    thread of its own has seen it: how much that is nobody can say, but never the batch once more.
    """
    return SLACK + (batch if backend_name() == "cuda" else 2 * batch // layers)


def capacity(tokens: int) -> int:
    """Tokens that a row has room for."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


class Peak:
    """Peak of MLX's memory above what is active when it begins."""

    def __init__(self) -> None:
        mx.clear_cache()
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()

    @property
    def above(self) -> int:
        return mx.get_peak_memory() - self.before


def prompts() -> list[list[int]]:
    """Of about one length, none of which begins like another."""
    return [[40 + row, *(33 + at % 90 for at in range(LENGTH - row))] for row in range(ROWS)]


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_rows_from_the_prompt_cache_take_what_admission_counts(
    tier: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by the longest row, and two layers beside.

    Measured until the first answer is kept: that copy belongs to the prompt cache and its cap.
    """
    spec = ModelSpec(kind="full", layers=8)
    monkeypatch.setattr(layerwise, "TOGETHER", 0)
    store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 34)
    store.open()
    cold = ColdSettings(
        tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 33, debounce_s=0.0
    )
    cache = PromptCache(entries_max=50, bytes_max=None, cold=cold)
    put = cache.put
    peaks: list[int] = []
    settings: dict[str, Any] = {
        "decode_concurrency": ROWS,
        "prompt_concurrency": ROWS,
        "prefill_step_size": 256,
    }

    async def main() -> None:
        async with rig(
            model_folder(spec), make_prompt_cache=lambda _: cache, **settings
        ) as running:
            for prompt in prompts():
                await running.run(tokens_request(prompt, max_tokens=1))
            await running.wait_idle()
            assert (await asyncio.to_thread(cache.flush, 60)).durable
            row = cache.figures().ram_bytes // ROWS * capacity(LENGTH + 16) // LENGTH
            assert cache.figures().ram_entries == ROWS
            if tier == "ssd":
                cache.trim_to(0)
            peak = Peak()

            def put_noted(*arguments: Any) -> None:
                peaks.append(peak.above)
                put(*arguments)

            monkeypatch.setattr(cache, "put", put_noted)
            requests = [tokens_request(prompt, max_tokens=16) for prompt in prompts()]
            answers = await asyncio.gather(*(running.run(each) for each in requests))
            await running.wait_idle()
            for answer in answers:
                assert answer.end.timings.cache_tier == tier
                assert answer.end.cached_tokens >= answer.end.prompt_tokens - 1
            assert peaks, "none was kept"
            assert ROWS * row // 2 < peaks[0] <= ROWS * row + beside(ROWS * row, spec.layers)

    run_async(main())
    cache.close(10)


# -- the batch alone, with caches that are large beside what its steps compute

LAYERS, HEADS, WIDTH = 12, 4, 64
WINDOW = 512
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4


class Join:
    """A row: when it joins, what it has from a cache, what is left to run, how much it writes."""

    def __init__(self, step: int, cached: int, left: int, writes: int) -> None:
        self.step, self.cached, self.left, self.writes = step, cached, left, writes

    @property
    def length(self) -> int:
        return self.cached + self.left + self.writes


SCENARIOS = {
    "together": [Join(0, 750 + row, 1, 6) for row in range(4)],
    "one after the other": [Join(3 * row, 700 + row, 1, 12) for row in range(4)],
    "leaving": [Join(0, 700 + row, 1, 4 + 3 * row) for row in range(4)],
    "growing": [Join(0, 760 + row, 1, 14) for row in range(4)],
    "of unlike lengths": [Join(0, 600 + 50 * row, 1 + 40 * row, 4) for row in range(4)],
}


def wide_model() -> Any:
    mx.random.seed(3)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=LAYERS,
            intermediate_size=32,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            rms_norm_eps=1e-5,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


def filled(make: Callable[[], Any], tokens: int) -> list[Any]:
    """A cache as a prefill leaves it: random rows, the same ones for the same length."""
    mx.random.seed(tokens)
    cache = [make() for _ in range(LAYERS)]
    for part in cache:
        rows = mx.random.normal((1, HEADS, tokens, WIDTH))
        for at in range(0, tokens, 64):
            piece = rows[..., at : at + 64, :]
            part.update_and_fetch(piece, piece)
        mx.eval(part.keys, part.values)
    return cache


def steps(generator: BatchGenerator, joins: list[Join], caches: list[Any]) -> Iterator[list[Any]]:
    """Run rows as a lane would; yields the responses of each step."""
    number = 0
    waiting = list(joins)
    while True:
        while waiting and waiting[0].step <= number:
            join = waiting.pop(0)
            prompt = [1 + (at + join.cached) % 60 for at in range(join.left)]
            generator.insert([prompt], [join.writes], caches=[caches.pop(0)])
        ran = generator.next()
        yield ran[1]
        number += 1
        if not any(ran) and not waiting:
            return
        del ran


def peak_of(make: Callable[[], Any], joins: list[Join]) -> int:
    """Bytes at the peak, the rows' own caches included."""
    model = BatchModel(wide_model())
    peak = Peak()
    generator = LayerwiseGenerator(
        model, completion_batch_size=8, prefill_batch_size=8, prefill_step_size=64
    )
    caches = [filled(make, join.cached) for join in joins]
    for responses in steps(generator, joins, caches):
        responses.clear()  # one that has ended holds the batch it was in
    generator.close()
    return peak.above


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", ["KVCache", "RotatingKVCache"])
def test_a_batch_takes_rows_by_the_longest_row_and_two_layers(
    kind: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "TOGETHER", 0)
    joins = SCENARIOS[scenario]
    window = kind == "RotatingKVCache"
    make: Callable[[], Any] = (lambda: RotatingKVCache(WINDOW)) if window else KVCache
    # A window has room for the piece of a prompt that came last.
    longest = WINDOW + 63 if window else capacity(max(join.length for join in joins))
    bound = len(joins) * longest * TOKEN_BYTES
    assert bound // 2 < peak_of(make, joins) <= bound + beside(bound, LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_large_batch_takes_no_more_than_is_budgeted(scenario: str) -> None:
    """Some 300 MB, with layers evaluated together as the product does it."""
    joins = [Join(e.step, 4 * e.cached, e.left, e.writes) for e in SCENARIOS[scenario]]
    bound = len(joins) * capacity(max(join.length for join in joins)) * TOKEN_BYTES
    assert bound > 256 << 20
    peak = peak_of(KVCache, joins)
    assert bound // 2 < peak <= bound + max(layerwise.BESIDE_BYTES, 2 * bound // LAYERS) + SLACK


@pytest.mark.parametrize(
    "spec", [FULL, SLIDING, RECURRENT, HYBRID, CACHE_LIST, SHARED_KV], ids=lambda spec: spec.kind
)
@pytest.mark.parametrize("together", [0, 1 << 16])
def test_tokens_and_caches_are_those_of_mlx_lms_own_generator(
    spec: ModelSpec, together: int, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whoever joins and leaves: layers are evaluated at other moments, that is all."""
    monkeypatch.setattr(layerwise, "TOGETHER", together)
    model: Any = BatchModel(load_model(model_folder(spec))[0])
    joins = [Join(at, 0, left, writes) for at, left, writes in SHAPES]

    def run(make: Callable[..., BatchGenerator]) -> tuple[list[Any], list[Any], list[Any]]:
        drawn_from: list[Any] = []

        def draw(logprobs: Any) -> Any:
            drawn_from.append(logprobs.tolist())
            return mx.argmax(logprobs, axis=-1)

        sizes = {"completion_batch_size": 8, "prefill_batch_size": 8, "prefill_step_size": 48}
        generator = make(model, sampler=draw, **sizes)
        tokens: list[Any] = []
        left: list[Any] = []
        for responses in steps(generator, joins, [make_prompt_cache(model) for _ in joins]):
            for each in responses:
                tokens.append((each.uid, each.token))
                if each.prompt_cache is not None:
                    arrays = [array.tolist() for array in arrays_of(each.prompt_cache)]
                    left.append((each.uid, each.all_tokens, arrays))
        generator.close()
        return tokens, left, drawn_from

    ours, theirs = run(LayerwiseGenerator), run(BatchGenerator)
    assert len(ours[1]) == len(joins)
    assert ours == theirs


def test_rows_are_forgotten_when_they_leave(full_model: Path) -> None:
    """Those without a prefill too: of a question that is asked again all but a token is cached."""
    generator = LayerwiseGenerator(BatchModel(load_model(full_model)[0]))
    generator.insert([[65], [65], [65, 66]], [2, 3, 2])
    while any(generator.next()):
        pass
    for _ in range(2):
        generator.insert([[65], [66]], [1, 2])
        while any(generator.next()):
            pass
    (left,) = generator.insert([[67]], [100])
    generator.next()
    generator.remove([left])
    for batch in (generator._prompt_batch, generator._generation_batch):  # pyright: ignore[reportPrivateUsage]
        assert not list(arrays_of([v for k, v in vars(batch).items() if k != "model"]))
        held = {k: v for k, v in vars(batch).items() if isinstance(v, list | dict) and v}
        assert not held
    generator.close()


# (step, prompt, writes): one after the other, of unlike lengths, over a step of the capacity.
SHAPES = [(0, 20, 9), (0, 75, 30), (2, 1, 5), (2, 230, 40), (9, 3, 3), (30, 49, 2)]

# What generation/layerwise.py overrides or stands in for. Where a text has changed: read it again
# beside that module, run the tests above, and put the new digest here.
RELIED_ON: dict[Any, str] = {
    BatchGenerator.__init__: "80fdd7d3fc89c375",
    BatchGenerator._make_batch: "c8d1adf640fc6d1b",  # pyright: ignore[reportPrivateUsage]
    BatchGenerator._next: "eb3a4e361dc2c19e",  # pyright: ignore[reportPrivateUsage]
    BatchGenerator.remove: "705e7de06f06d7de",
    PromptProcessingBatch: "4e0d4be705f4787f",
    GenerationBatch: "af6d7dee4ec6091e",
    mlx_cache.BatchKVCache: "474e6fe46261a118",
    mlx_cache.BatchRotatingKVCache: "ce5df245ade3e814",
}


@pytest.mark.parametrize("thing", RELIED_ON, ids=lambda thing: thing.__qualname__)
def test_what_it_relies_on_in_mlx_lm_is_as_it_was(thing: Any) -> None:
    source = inspect.getsource(thing)
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == RELIED_ON[thing]


@pytest.mark.parametrize(
    ("spec", "grows"),
    [(FULL, True), (SLIDING, True), (CACHE_LIST, True), (SHARED_KV, True), (RECURRENT, False)],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_every_kind_of_cache_that_grows_is_budgeted(
    spec: ModelSpec, grows: bool, model_folder: Folder
) -> None:
    model = load_model(model_folder(spec))[0]
    assert (room_for_rows(model) is not None) == grows


def test_windows_count_for_each_row_that_is_there(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 30
    monkeypatch.setattr("mlx_isolate_engine.generation.memory._free_bytes", lambda: free)
    model = load_model(model_folder(SLIDING))[0]
    room = room_for_rows(model)
    assert room is not None
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 64), mx.int32), cache=cache))
    windows: list[Any] = [part for part in cache if isinstance(part, RotatingKVCache)]
    growing: list[Any] = [part for part in cache if not isinstance(part, RotatingKVCache)]
    token = sum(part.nbytes // part.keys.shape[2] for part in growing)
    window = sum(part.nbytes // part.keys.shape[2] * part.max_size for part in windows)
    assert room.row_tokens * token == pytest.approx(window)
    share = max(1 / len(growing), 1 / len(windows))
    assert room.tokens == int(layerwise.batch_bytes(free * KV_SHARE, share) / token)


def test_what_a_batch_needs_beside_itself_is_two_groups_or_two_of_its_layers() -> None:
    group, layers = layerwise.TOGETHER, 10
    small = layerwise.batch_bytes(8 * group, 1 / layers)
    assert small == 6 * group
    large = layerwise.batch_bytes(60 * group, 1 / layers)
    assert large + 2 * large / layers == pytest.approx(60 * group)
