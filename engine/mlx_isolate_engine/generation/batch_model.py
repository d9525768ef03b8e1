"""Spares a batch what mlx-lm's caches of several rows cost beside those of one.

A mask of its own, since rows may be padded on the left. Where none is, it says nothing that
causality does not, and costs a lot: CUDA has no fused kernel for one token with such a mask, and a
prefill builds it, reads it and cannot skip what it hides. One client alone, and a crowd that asks
at once, are batches without padding.

An addition for each layer and token, which counts the rows' positions: they are the same in all
layers.

And, where a device plans each shape anew, most of the shapes (see few_shapes.py): a pass runs some
tokens more than it was given, which are forgotten again, and attention sees some keys more than are
held, which a mask hides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, create_attention_mask

from mlx_isolate_engine.generation.few_shapes import (
    MASKED_MAX,
    has_position_table,
    rounded_keys,
    rounded_tokens,
)

# mlx arrays are untyped here.
Array = Any
# What mlx-lm's attention takes: an array, "causal", or None for everything.
Mask = Any


class SparingKVCache(BatchKVCache):  # type: ignore[misc]  # mlx_lm has no types
    """A `BatchKVCache` that knows its rows' padding.

    Attributes:
        padding: positions of padding on the left of each row, as last read.
        settled: the array that it was read from; None = to be read anew.
        ahead: what `offset` will be after the next token, where others have computed it.
        shown: keys that the next pass is shown, held or not; 0 = those that are held.
    """

    padding: Sequence[int] = ()
    settled: Array = None
    ahead: Array = None
    shown: int = 0
    keys: Array
    values: Array
    _idx: int

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **more: Any
    ) -> Mask:
        """That of a single row (see `KVCache.make_mask`) where no row is padded."""
        if self.shown:
            return self._mask_of_shown(N, window_size)
        if any(self.padding):
            return super().make_mask(N, return_array, window_size=window_size, **more)
        return create_attention_mask(
            N, offset=self._idx, return_array=return_array, window_size=window_size
        )

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """See `KVCache.update_and_fetch`."""
        if self.shown:
            return self._update_and_show(keys, values)
        ahead, self.ahead = self.ahead, None
        end = self._idx + keys.shape[2]
        if ahead is None or self.keys is None or end > self.keys.shape[2]:
            pair: tuple[Array, Array] = super().update_and_fetch(keys, values)
            return pair
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        self._idx, self.offset = end, ahead
        return self.keys[..., :end, :], self.values[..., :end, :]

    def show_few(self, tokens: int) -> None:
        """Choose what the next pass, of so many tokens, is shown."""
        held = self._idx + tokens
        keys = rounded_keys(held)
        # At the beginning, and where that is a round number, causality alone says what is hidden.
        self.shown = keys if self._idx and keys != held and tokens <= MASKED_MAX else 0

    def _mask_of_shown(self, tokens: int, window_size: int | None) -> Array:
        """[rows or 1, 1, tokens, shown]: causality, which hides what is not held, and padding."""
        queries = mx.arange(self._idx, self._idx + tokens)[:, None]
        keys = mx.arange(self.shown)[None]
        mask = queries >= keys
        if window_size is not None:
            mask = mask & (queries < keys + window_size)
        if any(self.padding):
            mask = mask & (keys >= self.left_padding[:, None, None, None])
        return mask

    def _update_and_show(self, keys: Array, values: Array) -> tuple[Array, Array]:
        shown, self.shown = self.shown, 0
        end = self._idx + keys.shape[2]
        if (lacking := shown - self.keys.shape[2]) > 0:
            widths = [(0, 0), (0, 0), (0, lacking), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, widths), mx.pad(self.values, widths)
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        self._idx, self.offset = end, self.offset + keys.shape[2]
        return self.keys[..., :shown, :], self.values[..., :shown, :]

    def is_padded_right(self) -> bool:
        """Whether padding on the right will be moved to the left after this pass."""
        return self._right_padding is not None

    def is_as_far(self, other: "SparingKVCache") -> bool:
        """Whether its rows are at the same positions."""
        return self._idx == other._idx and self.padding == other.padding


class SparingRotatingKVCache(BatchRotatingKVCache):  # type: ignore[misc]
    """The same of a sliding window, as long as that hides nothing of what the cache holds."""

    padding: Sequence[int] = ()
    settled: Array = None

    def is_padded_right(self) -> bool:
        """Whether padding on the right will be moved to the left after this pass."""
        return self._lengths is not None

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """See `RotatingKVCache.make_mask`."""
        window = window_size or self.max_size
        if self._lengths is None and not any(each > 0 for each in self.padding):
            if N == 1 and window >= self.max_size:
                return None
            seen = min(self.max_size - 1, self._offset)
            if N > 1 and not return_array and seen + N <= window:
                return "causal"
        return super().make_mask(N, window_size, return_array)


_SPARING: dict[type[Any], type[Any]] = {
    BatchKVCache: SparingKVCache,
    BatchRotatingKVCache: SparingRotatingKVCache,
}


class BatchModel:
    """A model as a BatchGenerator calls it.

    Args:
        model: mlx_lm's.
        on_decode: called when a decode step is built and about to be computed, which needs no
            interpreter: what it sets going on other threads costs nobody anything.
        few_shapes: whether prompts run in shapes that come again (see few_shapes.py).

    Attributes:
        few_shapes: whether they do: never with a table of positions.
    """

    def __init__(
        self,
        model: Any,
        on_decode: Callable[[], None] | None = None,
        *,
        few_shapes: bool = False,
    ) -> None:
        self._model = model
        self._on_decode = on_decode
        self.few_shapes = few_shapes and not has_position_table(model)

    def __call__(self, inputs: Array, cache: Sequence[Any]) -> Array:
        """Logits of [rows, tokens] inputs."""
        known = _settle(cache)
        width = inputs.shape[1]
        if width == 1:
            _count_once(known)
        elif self.few_shapes and _are_plain(cache):
            return self._run_rounded(inputs, cache)
        logits = self._model(inputs, cache=cache)
        if width == 1 and self._on_decode is not None:
            self._on_decode()
        for part in known:
            if width > 1 or part.is_padded_right():
                # What follows a piece of prefill changes the padding inside its array.
                part.settled = None
        return logits

    def _run_rounded(self, inputs: Array, cache: Sequence[Any]) -> Array:
        """A piece of prompts, with zeros behind it that no token of it sees."""
        width = inputs.shape[1]
        more = rounded_tokens(width) - width
        for part in cache:
            part.show_few(width + more)
        logits = self._model(mx.pad(inputs, [(0, 0), (0, more)]), cache=cache)
        for part in cache:
            part.trim(more)
            part.shown, part.settled = 0, None
        return logits[:, :width]

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a model."""
        return getattr(self._model, name)


def _settle(cache: Sequence[Any]) -> list[Any]:
    """The parts that are sparing, from now on if they were not, with their padding up to date.

    Reading a padding waits for the device, so it is read once for each array: every change of who
    is in a batch makes a new one.
    """
    for part in cache:
        if (kind := _SPARING.get(type(part))) is not None:
            part.__class__ = kind
    kinds = tuple(_SPARING.values())
    known: list[Any] = [part for part in cache if isinstance(part, kinds)]
    changed = [part for part in known if part.settled is not part.left_padding]
    if changed:
        mx.eval([part.left_padding for part in changed])
        for part in changed:
            part.padding = part.left_padding.tolist()
            part.settled = part.left_padding
    return known


def _are_plain(cache: Sequence[Any]) -> bool:
    """Whether tokens can be forgotten again, and whether all layers are equally far."""
    first = cache[0] if cache else None
    return isinstance(first, SparingKVCache) and all(
        isinstance(part, SparingKVCache) and part.is_as_far(first) for part in cache
    )


def _count_once(known: Sequence[Any]) -> None:
    """Compute the rows' positions after the next token for all layers that are equally far."""
    plain = [part for part in known if isinstance(part, SparingKVCache)]
    if not plain:
        return
    first = plain[0]
    ahead = first.offset + 1
    for part in plain:
        part.ahead = ahead if part is first or part.is_as_far(first) else None
