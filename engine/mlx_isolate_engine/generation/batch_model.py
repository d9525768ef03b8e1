"""Spares a batch what mlx-lm's caches of several rows cost beside those of one.

A mask of its own, since rows may be padded on the left. Where none is, it says nothing that
causality does not, and costs a lot: CUDA has no fused kernel for one token with such a mask, and a
prefill builds it, reads it and cannot skip what it hides. One client alone, and a crowd that asks
at once, are batches without padding.

And an addition for each layer and token, which counts the rows' positions: they are the same in
all layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, create_attention_mask

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
    """

    padding: Sequence[int] = ()
    settled: Array = None
    ahead: Array = None
    keys: Array
    values: Array
    _idx: int

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **more: Any
    ) -> Mask:
        """That of a single row (see `KVCache.make_mask`) where no row is padded."""
        if any(self.padding):
            return super().make_mask(N, return_array, window_size=window_size, **more)
        return create_attention_mask(
            N, offset=self._idx, return_array=return_array, window_size=window_size
        )

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """See `KVCache.update_and_fetch`."""
        ahead, self.ahead = self.ahead, None
        end = self._idx + keys.shape[2]
        if ahead is None or self.keys is None or end > self.keys.shape[2]:
            pair: tuple[Array, Array] = super().update_and_fetch(keys, values)
            return pair
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        self._idx, self.offset = end, ahead
        return self.keys[..., :end, :], self.values[..., :end, :]

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
    """

    def __init__(self, model: Any, on_decode: Callable[[], None] | None = None) -> None:
        self._model = model
        self._on_decode = on_decode

    def __call__(self, inputs: Array, cache: Sequence[Any]) -> Array:
        """Logits of [rows, tokens] inputs."""
        known = _settle(cache)
        width = inputs.shape[1]
        if width == 1:
            _count_once(known)
        logits = self._model(inputs, cache=cache)
        if width == 1 and self._on_decode is not None:
            self._on_decode()
        for part in known:
            if width > 1 or part.is_padded_right():
                # What follows a piece of prefill changes the padding inside its array.
                part.settled = None
        return logits

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


def _count_once(known: Sequence[Any]) -> None:
    """Compute the rows' positions after the next token for all layers that are equally far."""
    plain = [part for part in known if isinstance(part, SparingKVCache)]
    if not plain:
        return
    first = plain[0]
    ahead = first.offset + 1
    for part in plain:
        part.ahead = ahead if part is first or part.is_as_far(first) else None
