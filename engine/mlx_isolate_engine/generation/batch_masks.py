"""Keeps a batch whose rows need no padding on the attention kernels that need no mask.

mlx-lm gives every batch a mask of its own, since rows may be padded on the left. Where none is, it
says nothing that causality does not, and costs a lot: CUDA has no fused kernel for one token with
such a mask, and a prefill builds it, reads it and cannot skip what it hides. One client alone, and
a crowd that asks at once, are batches without padding.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, create_attention_mask

# What mlx-lm's attention takes: an array, "causal", or None for everything.
Mask = Any


class UnpaddedKVCache(BatchKVCache):  # type: ignore[misc]  # mlx_lm has no types
    """A `BatchKVCache` while no row is padded: its masks are those of a single row."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        """See `KVCache.make_mask`."""
        return create_attention_mask(
            N, offset=self._idx, return_array=return_array, window_size=window_size
        )


class UnpaddedRotatingKVCache(BatchRotatingKVCache):  # type: ignore[misc]
    """The same for a sliding window, as long as that hides nothing of what the cache holds."""

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """See `RotatingKVCache.make_mask`."""
        window = window_size or self.max_size
        if self._lengths is None:
            if N == 1 and window >= self.max_size:
                return None
            seen = min(self.max_size - 1, self._offset)
            if N > 1 and not return_array and seen + N <= window:
                return "causal"
        return super().make_mask(N, window_size, return_array)


_UNPADDED: dict[type[Any], type[Any]] = {
    BatchKVCache: UnpaddedKVCache,
    BatchRotatingKVCache: UnpaddedRotatingKVCache,
}
_PADDED = {unpadded: padded for padded, unpadded in _UNPADDED.items()}


class BatchModel:
    """A model as a BatchGenerator calls it.

    Args:
        model: mlx_lm's.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: Any, cache: Sequence[Any]) -> Any:
        """Logits of [rows, tokens] inputs."""
        known = [part for part in cache if type(part) in _UNPADDED or type(part) in _PADDED]
        _settle(known)
        logits = self._model(inputs, cache=cache)
        if inputs.shape[1] > 1:
            # What follows a piece of prefill changes the padding inside the array.
            for part in known:
                part.settled = None
        return logits

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a model."""
        return getattr(self._model, name)


def _settle(parts: Sequence[Any]) -> None:
    """Give each part whose padding is another than before the class that fits it.

    Reading a padding waits for the device, so it is read once for each array: every change of who
    is in a batch makes a new one.
    """
    changed = [part for part in parts if getattr(part, "settled", None) is not part.left_padding]
    if not changed:
        return
    mx.eval([part.left_padding for part in changed])
    for part in changed:
        kind = type(part)
        if any(padding > 0 for padding in part.left_padding.tolist()):
            part.__class__ = _PADDED.get(kind, kind)
        else:
            part.__class__ = _UNPADDED.get(kind, kind)
        part.settled = part.left_padding
