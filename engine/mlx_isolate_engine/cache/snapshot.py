"""Copies of caches that share no array object with a running generation.

MLX facts this rests on: `array[...] = x` changes the array *object*, for every holder of it; a
copied object shares the buffer, and MLX writes to a shared buffer by copying it first. A slice
that happens to be row-contiguous shares its base's buffer even through `mx.contiguous`, so a row
taken out of a batch can pin the whole batch (any model with one KV head).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from mlx_isolate_engine.cache.kinds import TABLE, leaves, position
from mlx_isolate_shared.errors import CacheError

# Bytes that do not matter: a copy of them costs nothing, and pinning them does not either.
_ALREADY_SMALL = 64 * 1024
# What an allocator may add to a buffer: CUDA's rounds to pages, and reuses what is a little larger.
_ROUNDED = 32 * 1024
# Bytes that are evaluated together, and that a `keep` may need for a moment beside what it keeps.
_TOGETHER = 16 << 20


def own_copy(array: Any) -> Any:
    """The same bits in a buffer of their own, row-contiguous, lazily."""
    axis = max(range(array.ndim), key=lambda a: array.shape[a], default=0)
    if array.ndim == 0 or array.shape[axis] < 2 or array.size == 0:
        return copy.copy(array)  # at most one element: nothing worth a buffer is pinned
    # Concatenating two parts is the one operation that never returns its input's buffer.
    first, second = mx.split(array, [array.shape[axis] // 2], axis=axis)
    return mx.concatenate([first, second], axis=axis)


class _Keeping:
    """Arrays on their way into evaluated objects of their own, some at a time.

    Each evaluation waits for a GPU; one an array would hold the other rows of a batch up for as
    long as many steps take.
    """

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._puts: list[Callable[[Any], None]] = []
        self._lasts: list[Callable[[], None]] = []

    def own(self, array: Any, put: Callable[[Any], None]) -> None:
        """`put` gets the same bits in a buffer that belongs to nobody larger."""
        if self._arrays and sum(a.nbytes for a in self._arrays) + array.nbytes > _TOGETHER:
            self._evaluate()
        self._arrays.append(mx.contiguous(array))  # the same buffer where strides are plain
        self._puts.append(put)

    def at_last(self, call: Callable[[], None]) -> None:
        """`call` once every array is where it belongs."""
        self._lasts.append(call)

    def finish(self) -> None:
        """Evaluate what is left."""
        self._evaluate()
        for call in self._lasts:
            call()

    def _evaluate(self) -> None:
        arrays, self._arrays = self._arrays, []
        before = mx.get_active_memory()
        mx.eval(arrays)
        grown = mx.get_active_memory() - before
        size = sum(array.nbytes for array in arrays)
        rounded = sum(min(_ROUNDED, array.nbytes // 2) for array in arrays)
        # Just these buffers were made: there are no views of a batch, nor second copies.
        if not _ALREADY_SMALL <= size <= grown <= size + rounded + _ALREADY_SMALL:
            arrays = [own_copy(array) for array in arrays]
            mx.eval(arrays)
        for put, array in zip(self._puts, arrays, strict=True):
            put(array)
        self._puts.clear()


def _keep_arrays(arrays: Sequence[Any], length: int, keeping: _Keeping) -> list[Any]:
    """Own objects for KV arrays of capacity shape; exact-length rows may pin a batch: copied."""
    kept = list(arrays)
    for place, array in enumerate(arrays):
        if array.shape[2] > length:
            kept[place] = mx.contiguous(array)  # shares the buffer unless its strides are odd
            mx.eval(kept[place])
        else:
            keeping.own(array, partial(kept.__setitem__, place))
    return kept


def _keep_leaf(part: Any, length: int, keeping: _Keeping) -> Any:
    kept: Any = copy.copy(part)
    kind: Any = type(part)  # Any: mlx-lm's classes say None where arrays come later
    if kind is mlx_cache.KVCache:
        if part.keys is not None:
            pair = _keep_arrays((part.keys, part.values), part.offset, keeping)

            def set_pair() -> None:
                kept.keys, kept.values = pair

            keeping.at_last(set_pair)
            kept.offset = length
    elif kind is mlx_cache.QuantizedKVCache:
        if part.keys is not None:
            keys, values = (_keep_arrays(a, part.offset, keeping) for a in (part.keys, part.values))

            def set_quantized() -> None:
                kept.keys, kept.values = tuple(keys), tuple(values)

            keeping.at_last(set_quantized)
            kept.offset = length
    elif kind is mlx_cache.ArraysCache:
        kept.cache = list(part.cache)
        for place, array in enumerate(part.cache):
            if array is not None:
                keeping.own(array, partial(kept.cache.__setitem__, place))
        for name in ("left_padding", "lengths"):
            if (array := getattr(part, name)) is not None:
                keeping.own(array, partial(setattr, kept, name))
    elif kind in TABLE:
        if part.keys is not None:
            keeping.own(part.keys, partial(setattr, kept, "keys"))
            keeping.own(part.values, partial(setattr, kept, "values"))
            if part.offset > length:
                keeping.at_last(partial(kept.trim, part.offset - length))
    else:
        kept = _copy_of_unknown(part)
    return kept


def _copy_of_unknown(part: Any) -> Any:
    try:
        kept = copy.deepcopy(part)
        arrays = list(arrays_of([kept]))
    except Exception as error:
        # Code of the model's own, which may hold what cannot be copied: a dtype will do.
        raise CacheError(f"{type(part).__name__} cannot be copied: {error}") from error
    mx.eval(arrays)
    return kept


def _keep_parts(cache: Sequence[Any], length: int, keeping: _Keeping) -> list[Any]:
    return [
        mlx_cache.CacheList(*_keep_parts(part.caches, length, keeping))
        if type(part) is mlx_cache.CacheList
        else _keep_leaf(part, length, keeping)
        for part in cache
    ]


def keep(cache: Sequence[Any], length: int) -> list[Any]:
    """What the RAM tier keeps of a cache that stands for `length` tokens: evaluated, its own.

    Beyond what is kept it needs room for one array, or for 16 MiB of smaller ones.

    Args:
        cache: one row, of any kinds; leaves ahead of `length` are cut (see kinds.usable_length).
        length: tokens.

    Raises:
        CacheError: it holds a kind that is not known, and that cannot be copied.
    """
    keeping = _Keeping()
    kept = _keep_parts(cache, length, keeping)
    keeping.finish()
    return kept


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
