"""Copies of caches that share no array object with a running generation.

MLX facts this rests on: `array[...] = x` changes the array *object*, for every holder of it; a
copied object shares the buffer, and MLX writes to a shared buffer by copying it first. A slice
that happens to be row-contiguous shares its base's buffer even through `mx.contiguous`, so a row
taken out of a batch can pin the whole batch (any model with one KV head).
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from mlx_isolate_engine.cache.kinds import TABLE, leaves, position

# Bytes that do not matter: a copy of them costs nothing, and pinning them does not either.
_ALREADY_SMALL = 64 * 1024


def own_copy(array: Any) -> Any:
    """The same bits in a buffer of their own, row-contiguous, lazily."""
    axis = max(range(array.ndim), key=lambda a: array.shape[a], default=0)
    if array.ndim == 0 or array.shape[axis] < 2 or array.size == 0:
        return copy.copy(array)  # at most one element: nothing worth a buffer is pinned
    # Concatenating two parts is the one operation that never returns its input's buffer.
    first, second = mx.split(array, [array.shape[axis] // 2], axis=axis)
    return mx.concatenate([first, second], axis=axis)


def _own_evaluated(array: Any) -> Any:
    """An evaluated object of our own in a buffer that belongs to nobody larger."""
    array = mx.contiguous(array)  # returns the same buffer where strides are plain
    before = mx.get_active_memory()
    mx.eval(array)
    grown = mx.get_active_memory() - before
    if _ALREADY_SMALL <= array.nbytes <= grown <= array.nbytes + _ALREADY_SMALL:
        return array  # the evaluation made just this buffer: no view of a batch, no second copy
    owned = own_copy(array)
    mx.eval(owned)  # one at a time: the peak is one tensor above the entry
    return owned


def _adopt(array: Any, length: int) -> Any:
    """Own object for a KV array of capacity shape; exact-length rows may pin a batch: copy."""
    if array.shape[2] > length:
        owned = mx.contiguous(array)  # shares the buffer unless its strides are odd
        mx.eval(owned)
        return owned
    return _own_evaluated(array)


def _keep_leaf(part: Any, length: int) -> Any:
    kept: Any = copy.copy(part)
    kind: Any = type(part)  # Any: mlx-lm's classes say None where arrays come later
    if kind is mlx_cache.KVCache:
        if part.keys is not None:
            kept.keys, kept.values = (_adopt(a, part.offset) for a in (part.keys, part.values))
            kept.offset = length
    elif kind is mlx_cache.QuantizedKVCache:
        if part.keys is not None:
            kept.keys = tuple(_adopt(a, part.offset) for a in part.keys)
            kept.values = tuple(_adopt(a, part.offset) for a in part.values)
            kept.offset = length
    elif kind is mlx_cache.ArraysCache:
        kept.cache = [None if a is None else _own_evaluated(a) for a in part.cache]
        for name in ("left_padding", "lengths"):
            if (array := getattr(part, name)) is not None:
                setattr(kept, name, _own_evaluated(array))
    elif kind in TABLE:
        if part.keys is not None:
            kept.keys, kept.values = _own_evaluated(part.keys), _own_evaluated(part.values)
            if part.offset > length:
                kept.trim(part.offset - length)
    else:
        kept = copy.deepcopy(part)
        mx.eval(list(arrays_of([kept])))
    return kept


def keep(cache: Sequence[Any], length: int) -> list[Any]:
    """What the RAM tier keeps of a cache that stands for `length` tokens: evaluated, its own.

    Args:
        cache: one row, of any kinds; leaves ahead of `length` are cut (see kinds.usable_length).
        length: tokens.
    """
    return [
        mlx_cache.CacheList(*keep(part.caches, length))
        if type(part) is mlx_cache.CacheList
        else _keep_leaf(part, length)
        for part in cache
    ]


def _hand_out_leaf(part: Any, length: int) -> Any:
    kind: Any = type(part)
    if kind in (mlx_cache.KVCache, mlx_cache.QuantizedKVCache):
        given: Any = copy.copy(part)
        if part.keys is None:
            return given
        # Exact-length views: the first write of the generation moves just these rows into a
        # buffer of its own, however long the stored entry is.
        if kind is mlx_cache.KVCache:
            given.keys, given.values = part.keys[..., :length, :], part.values[..., :length, :]
        else:
            given.keys = tuple(a[..., :length, :] for a in part.keys)
            given.values = tuple(a[..., :length, :] for a in part.values)
        given.offset = length
        return given
    given = copy.deepcopy(part)  # new array objects, same buffers
    # `until_wrapped` leaves say themselves how far they are.
    if (ahead := getattr(part, "offset", length) - length) > 0:
        given.trim(ahead)
    return given


def hand_out(cache: Sequence[Any], length: int) -> list[Any]:
    """A kept cache cut to `length` tokens for a generation to write to; copies no buffer."""
    return [
        mlx_cache.CacheList(*hand_out(part.caches, length))
        if type(part) is mlx_cache.CacheList
        else _hand_out_leaf(part, length)
        for part in cache
    ]


def cut_in_place(cache: Sequence[Any], length: int) -> None:
    """Shorten a cuttable cache that nobody else holds to `length` tokens."""
    for part in leaves(cache):
        if (ahead := (position(part) or 0) - length) > 0:
            part.trim(ahead)


def arrays_of(value: Any) -> Iterator[Any]:
    """Every array in a cache, in lists and tuples and attributes, unknown kinds included."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_of(item)
    elif hasattr(value, "__dict__"):
        yield from arrays_of(vars(value))


def bytes_of(cache: Sequence[Any]) -> int:
    """Bytes of all arrays in a cache."""
    return sum(array.nbytes for array in arrays_of(list(cache)))
