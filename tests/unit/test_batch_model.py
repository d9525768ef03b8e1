"""What a batch is spared: masks exactly where they hide nothing that causality does not."""

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
)

from mlx_isolate_engine.generation.batch_model import BatchModel

WINDOW = 8
LETTERS = 16


class Attending:
    """A model of two layers, which notes its masks and those that mlx-lm would have had."""

    def __init__(self, window: int | None = None) -> None:
        self.layers = [None, None]
        self.window = window
        self.masks: list[Any] = []
        self.usual: list[Any] = []
        self.held: list[int] = []

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(self.window) if self.window else KVCache(), KVCache()]

    def __call__(self, inputs: Any, cache: Any) -> Any:
        rows, width = inputs.shape
        part = cache[0]
        self.masks.append(part.make_mask(width, return_array=False, window_size=self.window))
        kind: Any = BatchRotatingKVCache if self.window else BatchKVCache
        self.usual.append(kind.make_mask(part, width, window_size=self.window))
        held: list[int] = []
        for layer in cache:
            # What a token writes is its position, so that it can be read again.
            places = layer.offset[:, None, None, None] + mx.arange(width)[None, None, :, None]
            new = mx.broadcast_to(places, (rows, 1, width, 2))
            keys, _ = layer.update_and_fetch(new, new)
            held.append(keys.shape[2])
        self.held.append(held[0])
        if width == 1:
            self.check_positions(cache[1])
        return mx.zeros((rows, width, LETTERS))

    def check_positions(self, layer: Any) -> None:
        for row, padding in enumerate(layer.left_padding.tolist()):
            kept = layer.keys[row, 0, padding : layer._idx, 0].tolist()
            assert kept == list(range(layer._idx - padding))
            assert layer.offset[row].item() == len(kept)

    def is_same(self, step: int) -> bool:
        """Whether the mask of a pass hides what mlx-lm's would have hidden."""
        mask, usual, held = self.masks[step], self.usual[step], self.held[step]
        width = usual.shape[-2]
        if mask is None:
            mask = mx.ones((width, held), dtype=mx.bool_)
        elif isinstance(mask, str):
            mask = create_causal_mask(width, held - width)
        return bool(mx.array_equal(mx.broadcast_to(mask, usual.shape), usual))


def generator(model: Attending) -> BatchGenerator:
    bare: Any = BatchModel(model)
    return BatchGenerator(bare, completion_batch_size=8, prefill_batch_size=8, prefill_step_size=4)


def test_one_row_has_no_mask_of_its_own() -> None:
    model = Attending()
    batch = generator(model)
    batch.insert([[1] * 13], [3])
    while any(batch.next()):
        pass
    assert model.masks[:3] == ["causal"] * 3
    assert set(model.masks[3:]) == {None}


def test_rows_of_one_length_have_none_either() -> None:
    model = Attending()
    batch = generator(model)
    batch.insert([[1] * 5] * 3, [3] * 3)
    while any(batch.next()):
        pass
    assert model.masks == ["causal", None, None, None, None][: len(model.masks)]


def test_a_shorter_neighbour_brings_the_mask_and_takes_it_away_again() -> None:
    model = Attending()
    batch = generator(model)
    batch.insert([[1] * 5, [1] * 3], [9, 2])
    while any(batch.next()):
        pass
    assert model.masks[0] == "causal"  # padded on the right only, which causality hides
    assert isinstance(model.masks[1], mx.array)
    assert model.masks[-1] is None


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "sliding"])
def test_no_mask_ever_hides_more_or_less(window: int | None) -> None:
    dice = random.Random(3)
    spared = 0
    for _ in range(40):
        model = Attending(window)
        batch = generator(model)
        alike = dice.random() < 0.5
        for _ in range(dice.randint(3, 20)):
            if dice.random() < 0.4:
                rows = dice.randint(1, 3)
                lengths = [dice.randint(2, 14)] * rows
                if not alike:
                    lengths = [dice.randint(2, 14) for _ in range(rows)]
                batch.insert([[1] * length for length in lengths], [dice.randint(1, 12)] * rows)
            batch.next()
        assert all(model.is_same(step) for step in range(len(model.masks)))
        spared += sum(not isinstance(mask, mx.array) for mask in model.masks)
    assert spared > 100


def test_it_tells_of_each_decode_step_once_it_is_built() -> None:
    model = Attending()
    told: list[int] = []
    bare: Any = BatchModel(model, lambda: told.append(len(model.masks)))
    batch = BatchGenerator(bare)
    batch.insert([[1] * 13], [3])
    while any(batch.next()):
        pass
    assert told == [number + 1 for number, mask in enumerate(model.masks) if mask is None]


def test_the_model_behind_is_asked_for_everything_else() -> None:
    model = Attending()
    bare = BatchModel(model)
    assert bare.layers is model.layers
    assert bare.make_cache()[0].offset == 0
