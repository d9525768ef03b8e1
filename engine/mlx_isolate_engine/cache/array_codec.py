"""mlx-lm caches as named tensors, and tensors as mlx arrays: the one place that knows both.

Names and order are those of mlx-lm's own flattening, so that its loader finds what it expects.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_cache

from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.kinds import TABLE, kind_of
from mlx_isolate_shared.errors import CacheError

DTYPES: dict[Any, str] = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32",
    mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64", mx.complex64: "C64",
}  # fmt: skip
_MLX_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_NUMPY_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "C64": "<c8",
}  # fmt: skip
# A smaller tensor is made from a buffer of Python's: an evaluation for each costs more than the
# copy, and small entries have nothing else.
SMALL_BYTES = 256 * 1024
# Bytes handed to one write; between two of them the writer may be asked to pause.
PIECE_BYTES = 4 * 1024 * 1024
_ZEROS = memoryview(bytes(PIECE_BYTES))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of an entry as it will lie in a file.

    Attributes:
        shape: in the file.
        array: evaluated mlx array, None where `data` holds the bytes (Python values).
        rows: for a rounded tensor, rows of the third axis that are real; None = all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Any = None
    data: bytes = b""
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A cache taken apart: tensors in mlx-lm's order, its class names, names of Python values."""

    tensors: tuple[Tensor, ...]
    classes: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]

    @property
    def rounded(self) -> frozenset[str]:
        """Names of tensors that are padded beyond the tokens."""
        return frozenset(t.name for t in self.tensors if t.rows is not None)


def capacity(tokens: int, step: int = mlx_cache.KVCache.step) -> int:
    """Rows for `tokens`: the next multiple of the cache's step with at least one row free."""
    return (tokens // step + 1) * step


def flatten(cache: Sequence[Any]) -> Flat:
    """Take a storable cache apart without touching its data.

    Raises:
        CacheError: an array's type has no place in the file format.
    """
    tensors: list[Tensor] = []
    scalars: list[tuple[str, str]] = []
    for at, part in enumerate(cache):
        for name, value, rows in _states(str(at), part):
            tensor, kind = _tensor(name, value, rows)
            tensors.append(tensor)
            if kind is not None:
                scalars.append((name, kind))
    classes = tuple(type(part).__name__ for part in cache)
    return Flat(tensors=tuple(tensors), classes=classes, scalars=tuple(scalars))


def _states(prefix: str, part: Any) -> Iterator[tuple[str, Any, int | None]]:
    if type(part) is mlx_cache.CacheList:
        for at, inner in enumerate(part.caches):
            yield from _states(f"{prefix}.{at}.0", inner)
            yield f"{prefix}.{at}.1", type(inner).__name__, None
        return
    rows = part.offset if kind_of(part).layout == "rounded" else None
    for name, value in tree_flatten(part.state, prefix=f".{prefix}"):
        is_rows = rows is not None and isinstance(value, mx.array)
        yield name, value, rows if is_rows else None


def _tensor(name: str, value: Any, rows: int | None) -> tuple[Tensor, str | None]:
    """A value of a cache's state as mlx-lm would save it, and the kind of Python value it was."""
    if isinstance(value, mx.array):
        shape = tuple(value.shape)
        if rows is not None:
            shape = (*shape[:2], capacity(rows), *shape[3:])
        dtype = DTYPES.get(value.dtype)
        if dtype is None:
            raise CacheError(f"no file type for {value.dtype}")
        return Tensor(name=name, dtype=dtype, shape=shape, array=value, rows=rows), None
    if value is None:
        return Tensor(name=name, dtype="F32", shape=(0,)), "none"
    if isinstance(value, str):
        codes = [ord(char) for char in value]
        data = struct.pack(f"<{len(codes)}i", *codes)
        return Tensor(name=name, dtype="I32", shape=(len(codes),), data=data), "string"
    if isinstance(value, bool):
        return Tensor(name=name, dtype="BOOL", shape=(), data=struct.pack("<?", value)), "scalar"
    if isinstance(value, int):
        return Tensor(name=name, dtype="I32", shape=(), data=struct.pack("<i", value)), "scalar"
    assert isinstance(value, float), type(value)
    return Tensor(name=name, dtype="F32", shape=(), data=struct.pack("<f", value)), "scalar"


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in file order, at most PIECE_BYTES each, without copying them."""
    if tensor.array is None:
        yield memoryview(tensor.data)
        return
    if tensor.array.size == 0:
        return
    flat = _bytes(tensor.array)
    if tensor.rows is None:
        yield from _split(flat)
        return
    planes = math.prod(tensor.shape[:2])
    plane = len(flat) // planes
    row = plane // tensor.array.shape[2]
    padding = (tensor.shape[2] - tensor.rows) * row
    for at in range(planes):
        yield from _split(flat[at * plane : at * plane + tensor.rows * row])
        for start in range(0, padding, PIECE_BYTES):
            yield _ZEROS[: min(PIECE_BYTES, padding - start)]


def _bytes(array: Any) -> memoryview:
    view = memoryview(array)
    if not view.c_contiguous:  # what the RAM tier keeps is; this is for callers that made their own
        whole: Any = mx.contiguous(array)
        view = memoryview(whole)
    return view.cast("B")


def _split(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


class ArrayBuffers:
    """Makes mlx arrays whose bytes are filled from outside.

    Where the array's memory can be written to through a buffer (CPU and Metal: unified memory),
    bytes are read straight into it; elsewhere, and where there are few, they are read into one
    scratch buffer and copied.
    """

    def __init__(self) -> None:
        probe = mx.zeros((4,), dtype=mx.uint8)
        mx.eval(probe)
        view = _bytes(probe)
        if not view.readonly:
            view[1] = 7
        view.release()
        self.direct = probe.tolist() == [0, 7, 0, 0]

    def new(self, dtype: str, shape: tuple[int, ...]) -> "Filling":
        """A zeroed array to be filled through `Filling.view`."""
        is_small = math.prod(shape) * _MLX_DTYPES[dtype].size <= SMALL_BYTES
        return Filling(dtype, shape, direct=self.direct and not is_small)


class Filling:
    """One array being filled; write to `view`, then `finish`."""

    def __init__(self, dtype: str, shape: tuple[int, ...], *, direct: bool) -> None:
        self._dtype = _MLX_DTYPES[dtype]
        self._array: Any = None
        self._scratch: np.ndarray[Any, Any] | None = None
        size = math.prod(shape) * self._dtype.size
        if size == 0:
            self._array = mx.zeros(shape, dtype=self._dtype)
            self.view = memoryview(bytearray())
        elif direct:
            self._array = mx.zeros(shape, dtype=self._dtype)
            mx.eval(self._array)
            self.view = _bytes(self._array)
        else:
            self._scratch = np.zeros(shape, dtype=_NUMPY_TYPES[dtype])
            plain: Any = self._scratch.reshape(-1).view(np.uint8)
            self.view = memoryview(plain)

    def finish(self) -> Any:
        """The filled array; a small one is yet to be evaluated. The view is closed."""
        self.view.release()
        if self._scratch is None:
            return self._array
        array = mx.array(self._scratch)
        if array.dtype != self._dtype:  # numpy has no bfloat16
            array = array.view(self._dtype)
        if array.nbytes > SMALL_BYTES:
            mx.eval(array)  # so that no second buffer waits
        return array


def evaluate(arrays: Iterable[Any]) -> None:
    """Evaluate what is not yet, in one go."""
    mx.eval(list(arrays))


def assemble(
    classes: Sequence[str], scalars: Sequence[tuple[str, str]], arrays: Mapping[str, Any]
) -> list[Any]:
    """Put a cache together from its tensors.

    Raises:
        Damage: `structure`.
    """
    values = dict(arrays)
    known: dict[str, Any] = {kind.name: cls for cls, kind in TABLE.items()}
    try:
        for name, kind in scalars:
            values[name] = _value(values[name], kind)
        states = tree_unflatten(list(values.items()))
        if len(states) != len(classes):
            raise Damage("structure", f"{len(states)} states for {len(classes)} caches")
        return [known[name].from_state(state) for name, state in zip(classes, states, strict=True)]
    # mlx-lm's classes take whatever a file gives them, so wrong values fail in any of these ways.
    except (
        KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError,
    ) as error:  # fmt: skip
        raise Damage("structure", type(error).__name__) from error


def _value(array: Any, kind: str) -> Any:
    match kind:
        case "scalar":
            return array.item()
        case "string":
            return "".join(chr(code) for code in array.tolist())
        case "none":
            return None
        case _:
            raise Damage("structure", "unknown kind of value")
