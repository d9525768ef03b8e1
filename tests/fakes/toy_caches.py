"""Caches of every mlx-lm kind, filled as a model would fill them, and what attention sees.

A toy layer writes keys and values that depend on token and position only, so that what a cache
returns after a detour can be compared, bit for bit, with one that was filled from the start.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_isolate_engine.cache.snapshot import arrays_of

HEADS, WIDTH = 2, 64


def _rows(tokens: Sequence[int], start: int) -> mx.array:
    """Keys for tokens at positions from `start`: (1, HEADS, len, WIDTH) float32."""
    token = mx.array(list(tokens), dtype=mx.float32)[None, None, :, None]
    place = mx.arange(start, start + len(tokens), dtype=mx.float32)[None, None, :, None]
    head = mx.arange(HEADS, dtype=mx.float32)[None, :, None, None]
    width = mx.arange(WIDTH, dtype=mx.float32)[None, None, None, :]
    return mx.sin(token * 1.3 + place * 0.7 + head * 2.1 + width * 0.11)


def _feed_leaf(part: Any, tokens: Sequence[int], start: int) -> None:
    if isinstance(part, ArraysCache):
        for token in tokens:
            state = part[0] if part[0] is not None else mx.zeros((1, 4, WIDTH))
            part[0] = state * 0.5 + token
            part[1] = part[0] + 1
    elif isinstance(part, CacheList):
        for inner in part.caches:
            _feed_leaf(inner, tokens, start)
    else:
        rows = _rows(tokens, start)
        part.update_and_fetch(rows, rows + 1)
        if isinstance(part, ChunkedKVCache):
            part.maybe_trim_front()


def feed(cache: list[Any], tokens: Sequence[int], start: int, chunk: int = 1) -> None:
    for at in range(0, len(tokens), chunk):
        for part in cache:
            _feed_leaf(part, tokens[at : at + chunk], start + at)


def seen(cache: list[Any]) -> list[np.ndarray[Any, Any]]:
    """What attention would see next: the rows in their stored order, or the recurrent state."""
    found: list[np.ndarray[Any, Any]] = []
    for part in cache:
        if isinstance(part, CacheList):
            found += seen(list(part.caches))
        elif isinstance(part, ArraysCache):
            found += [np.array(a) for a in part.cache]
        else:
            found += [np.array(a) for a in arrays_of(part.keys_and_values())]
            found.append(np.array(part.offset))
    return found


def assert_same(left: list[Any], right: list[Any]) -> None:
    for a, b in zip(seen(left), seen(right), strict=True):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


Maker = Callable[[], list[Any]]
KINDS: dict[str, Maker] = {
    "kv": lambda: [KVCache(), KVCache()],
    "quantized": lambda: [QuantizedKVCache(group_size=64, bits=8)],
    "rotating": lambda: [RotatingKVCache(max_size=8), KVCache()],
    "rotating-keep": lambda: [RotatingKVCache(max_size=8, keep=2)],
    "chunked": lambda: [ChunkedKVCache(chunk_size=8)],
    "concatenate": lambda: [ConcatenateKVCache()],
    "arrays": lambda: [ArraysCache(size=2)],
    "list": lambda: [CacheList(ArraysCache(size=2), KVCache())],
    "list-kv": lambda: [CacheList(KVCache(), KVCache())],
}
CUTTABLE_WHEN_LONG = {"kv", "quantized", "list-kv"}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
