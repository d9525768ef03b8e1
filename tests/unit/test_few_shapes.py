"""Prompts of any length run in few shapes, and are answered as in their own."""

import os
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gpt2
from mlx_lm.models.cache import BatchKVCache

from mlx_isolate_engine import ahead
from mlx_isolate_engine.generation.batch_model import BatchModel
from mlx_isolate_engine.generation.few_shapes import (
    FINE_FROM,
    FINE_STEP,
    rounded_keys,
    rounded_tokens,
)
from mlx_isolate_engine.generation.layerwise import LayerwiseGenerator
from tests.integration.generation_rig import load_tiny
from tests.material.models import CACHE_KINDS, ModelSpec, build_model

PIECE = 64
TOKENS = 6
TURNS = 12
LETTERS = range(32, 127)


def test_a_rounded_number_is_the_next_of_few() -> None:
    for tokens in range(1, 2049):
        assert tokens <= rounded_tokens(tokens) <= max(tokens * 1.25, tokens + 15)
    assert len({rounded_tokens(tokens) for tokens in range(1, 2049)}) <= 28


def test_many_keys_are_rounded_finely() -> None:
    for tokens in range(FINE_FROM, 9 * FINE_FROM, 7):
        assert tokens <= rounded_keys(tokens) < tokens + FINE_STEP
    assert rounded_keys(FINE_FROM + 1) == FINE_FROM + FINE_STEP


class Attention:
    """Notes the shapes in which prompts attend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: set[tuple[int, int, int]] = set()
        self._real: Any = mx.fast.scaled_dot_product_attention
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", self)

    def __call__(self, queries: Any, keys: Any, *more: Any, **options: Any) -> Any:
        if queries.shape[2] > 1:
            self.shapes.add((queries.shape[0], queries.shape[2], keys.shape[2]))
        return self._real(queries, keys, *more, **options)


class Conversations:
    """Rows that come, go on and come back, on one generator.

    Args:
        model: of mlx-lm.
        few_shapes: as `BatchModel` takes it.
    """

    def __init__(self, model: Any, *, few_shapes: bool) -> None:
        self._generator = LayerwiseGenerator(
            BatchModel(model, few_shapes=few_shapes),
            completion_batch_size=8,
            prefill_batch_size=8,
            prefill_step_size=PIECE,
        )
        self._kept: list[tuple[Any, list[int]]] = []
        self.said: dict[int, list[int]] = {}

    def turn(self, dice: random.Random) -> None:
        """Some new rows, one of them the next turn of an old one, and some steps."""
        rows = dice.randint(1, 3)
        prompts = [dice.choices(LETTERS, k=dice.randint(2, 150)) for _ in range(rows)]
        old = self._kept.pop(dice.randrange(len(self._kept))) if self._kept else None
        self.ask(prompts, old)
        for _ in range(dice.randint(1, 2 * TOKENS)):
            self.step()

    def ask(self, prompts: list[list[int]], old: tuple[Any, list[int]] | None = None) -> None:
        """New rows; the first goes on from an old one."""
        caches: list[Any] = [None] * len(prompts)
        seen: list[list[int]] = [[] for _ in prompts]
        if old is not None:
            caches[0], seen[0] = old
        uids = self._generator.insert(
            prompts, max_tokens=[TOKENS] * len(prompts), caches=caches, all_tokens=seen
        )
        self.said |= {uid: [] for uid in uids}

    def step(self) -> bool:
        """One step; whether there was something to do."""
        prompts, tokens = self._generator.next()
        for each in tokens:
            self.said[each.uid].append(each.token)
            if each.finish_reason is not None:
                self._kept.append((each.prompt_cache, list(each.all_tokens or ())))
        return bool(prompts or tokens)


def talk(model: Any, turns: int, *, few_shapes: bool) -> dict[int, list[int]]:
    dice = random.Random(5)
    conversations = Conversations(model, few_shapes=few_shapes)
    for _ in range(turns):
        conversations.turn(dice)
    while conversations.step():
        pass
    return conversations.said


def test_conversations_of_any_length_run_in_round_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(build_model(tmp_path, ModelSpec(kind="full", context=4096))).model
    usual = talk(model, TURNS, few_shapes=False)
    attention = Attention(monkeypatch)
    assert talk(model, TURNS, few_shapes=True) == usual
    assert all(tokens == rounded_tokens(tokens) for _, tokens, _ in attention.shapes)
    assert all(keys == rounded_keys(keys) for *_, keys in attention.shapes)


@pytest.mark.parametrize(("few_shapes", "shapes"), [(False, 22), (True, 5)])
def test_prompts_of_many_lengths_share_a_few_shapes(
    few_shapes: bool, shapes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(build_model(tmp_path, CACHE_KINDS["full"])).model
    attention = Attention(monkeypatch)
    conversations = Conversations(model, few_shapes=few_shapes)
    for length in range(PIECE + 3, 2 * PIECE, 3):
        conversations.ask([[65] * length])
        while conversations.step():
            pass
    assert len(attention.shapes) == shapes


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_kind_of_cache_answers_the_same(kind: str, tmp_path: Path) -> None:
    model = load_tiny(build_model(tmp_path, CACHE_KINDS[kind])).model
    assert talk(model, 6, few_shapes=True) == talk(model, 6, few_shapes=False)


def test_a_table_of_positions_is_read_to_its_end_and_no_further() -> None:
    """What lies behind it in memory may be anything, also no number."""
    context, width = 64, 32
    model: Any = gpt2.Model(
        gpt2.ModelArgs(
            model_type="gpt2",
            n_ctx=context,
            n_embd=width,
            n_head=2,
            n_layer=2,
            n_positions=context,
            layer_norm_epsilon=1e-5,
            vocab_size=context,
        )
    )
    behind = mx.full((context, width), float("nan"))
    model.model.wpe.weight = mx.concatenate([model.model.wpe.weight, behind])
    batch = BatchModel(model, few_shapes=True)
    cache = [BatchKVCache([0]) for _ in range(2)]
    batch(mx.arange(50)[None], cache=cache)
    logits = batch(mx.arange(context - 51)[None], cache=cache)
    assert not mx.isnan(logits).any().item()


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_an_engine_outlives_many_shapes_unless_told_otherwise(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "MLX_ENABLE_CACHE_THRASHING_CHECK"
    monkeypatch.setenv(name, "")  # what the import sets is taken back at the end
    monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(ahead, "_MODEL_MODULES", ())
    ahead.import_model_libraries()
    assert os.environ[name] == after
