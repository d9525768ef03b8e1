"""What may be done with each kind of mlx-lm cache, as one table.

Owns the knowledge of mlx-lm's cache classes: which can be cut to a shorter prefix without a change
of any later token, how each is written to disk, and which settings each allows. The table was
checked against mlx-lm 0.32; `is_trimmable()` is not asked, since it says yes for classes whose
trim is wrong (ChunkedKVCache cuts too little once its front is gone, ConcatenateKVCache keeps the
cut rows in its arrays).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_lm.models import cache as mlx_cache

Cut = Literal["always", "until_wrapped", "never", "parts"]
Layout = Literal["rounded", "as_is", "parts", "none"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row of the table.

    Attributes:
        name: mlx-lm's class name, which is also what a file names.
        cut: when the cache may be shortened.
        layout: how arrays are stored: `rounded` = sequence axis padded with zeros to the next
            step with at least one free row, `as_is` = byte for byte, `parts` = what each part
            says, `none` = not at all.
        draft: a draft model may be used with it.
        kv_bits: `--kv-bits` may be used with it.
    """

    name: str
    cut: Cut
    layout: Layout
    draft: bool
    kv_bits: bool


UNKNOWN = Kind(name="unknown", cut="never", layout="none", draft=False, kv_bits=False)

TABLE: dict[type, Kind] = {
    mlx_cache.KVCache: Kind(
        name="KVCache", cut="always", layout="rounded", draft=True, kv_bits=True
    ),
    mlx_cache.QuantizedKVCache: Kind(
        name="QuantizedKVCache", cut="always", layout="rounded", draft=True, kv_bits=True
    ),
    mlx_cache.RotatingKVCache: Kind(
        name="RotatingKVCache", cut="until_wrapped", layout="as_is", draft=False, kv_bits=False
    ),
    mlx_cache.ChunkedKVCache: Kind(
        name="ChunkedKVCache", cut="never", layout="as_is", draft=False, kv_bits=False
    ),
    mlx_cache.ConcatenateKVCache: Kind(
        name="ConcatenateKVCache", cut="never", layout="as_is", draft=False, kv_bits=False
    ),
    mlx_cache.ArraysCache: Kind(
        name="ArraysCache", cut="never", layout="as_is", draft=False, kv_bits=False
    ),
    mlx_cache.CacheList: Kind(
        name="CacheList", cut="parts", layout="parts", draft=True, kv_bits=False
    ),
}


def kind_of(part: Any) -> Kind:
    """The row of exactly this class; a subclass is another kind, so it is unknown."""
    return TABLE.get(type(part), UNKNOWN)


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The parts of a model's cache in order, with every CacheList opened."""
    for part in cache:
        if type(part) is mlx_cache.CacheList:
            yield from leaves(part.caches)
        else:
            yield part


def is_empty(part: Any) -> bool:
    """Nothing has been written to this leaf yet (a layer that the model does not use)."""
    if type(part) is mlx_cache.ArraysCache:
        return all(array is None for array in part.cache)
    if type(part) in TABLE:
        return part.keys is None
    return False


def position(part: Any) -> int | None:
    """How many tokens a leaf has seen, or None where it does not know or holds nothing."""
    if is_empty(part):
        return None
    offset = getattr(part, "offset", None)
    return offset if isinstance(offset, int) else None


def _can_cut_leaf(part: Any) -> bool:
    match kind_of(part).cut:
        case "always":
            return True
        case "until_wrapped":
            # Once offset reaches the window, rows before it may be gone or turned round.
            return bool(part.offset < part.max_size)
        case "never" | "parts":
            return is_empty(part) and kind_of(part) is not UNKNOWN


def can_cut(cache: Sequence[Any]) -> bool:
    """Whether this very cache may be shortened: its weakest leaf decides."""
    return all(_can_cut_leaf(part) for part in leaves(cache))


def can_store(cache: Sequence[Any]) -> bool:
    """Whether this cache can be written to a file and come back the same."""
    return all(
        kind_of(part).layout != "none"
        # mlx-lm cannot read an empty ConcatenateKVCache back.
        and not (type(part) is mlx_cache.ConcatenateKVCache and is_empty(part))
        for part in leaves(cache)
    )


def allows_draft(cache: Sequence[Any]) -> bool:
    """Whether a draft model may run on this kind of cache (rejected tokens are cut off)."""
    return all(kind_of(part).draft for part in leaves(cache))


def allows_kv_bits(cache: Sequence[Any]) -> bool:
    """Whether `--kv-bits` may be used: mlx-lm converts top-level KVCache only."""
    return all(kind_of(part).kv_bits for part in cache)


def kind_names(cache: Sequence[Any]) -> tuple[str, ...]:
    """The distinct kinds in a cache, sorted, unknown ones by their class name."""
    return tuple(sorted({type(part).__name__ for part in leaves(cache)}))


def stands_for(cache: Sequence[Any], length: int) -> bool:
    """Whether every part that knows its position is at exactly `length` tokens."""
    return all(position(part) in (None, length) for part in leaves(cache))


def usable_length(tokens: int, cache: Sequence[Any]) -> int | None:
    """How many of `tokens` tokens this cache truly stands for, after cuts that are allowed.

    A lane may name one token more than the model has seen (the last one sampled), or hold a row
    that ran ahead; leaves may disagree after speculative decoding. Returns None where no length
    is certain: such a cache must not be kept.
    """
    found = list(leaves(cache))
    assert not any(type(part).__name__.startswith("Batch") for part in found), "not one row"
    positions = [p for p in map(position, found) if p is not None]
    if not positions:
        return tokens if any(not is_empty(part) for part in found) else None
    length = min(tokens, *positions)
    if all(p == length for p in positions):
        return length if length > 0 else None
    # Somebody is ahead and has to be cut. A leaf that does not know its position cannot follow.
    blind = any(position(part) is None and not is_empty(part) for part in found)
    if blind or not all(_can_cut_leaf(p) for p in found if position(p) not in (None, length)):
        return None
    return length if length > 0 else None
