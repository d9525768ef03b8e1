"""Cache files and mlx caches: atomic durable writes and streamed reads, tensor by tensor.

A write never holds more than the live entry; a read holds the new entry and fills it in place.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Generator
from math import prod
from pathlib import Path
from typing import Any

from mlx_isolate_engine.cache import array_codec
from mlx_isolate_engine.cache.array_codec import ArrayBuffers, Flat, Tensor
from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.durability import fetch_pages, forget_pages, sync
from mlx_isolate_engine.cache.kv_check import check_tensor, read_all
from mlx_isolate_engine.cache.kv_file import (
    EntryFacts,
    Header,
    TensorInfo,
    encode_header,
    lay_out,
)

# Above it the pages of a file are worth more to the model than a read ahead to the reader.
SMALL_FILE_BYTES = 4 * 1024 * 1024

# Asked before every tensor and every piece of one; may block, may raise to give the write up.
Gate = Callable[[], None]


def file_bytes(facts: EntryFacts, flat: Flat) -> int:
    """Length of the file that `write` would make."""
    placed = lay_out((t.name, t.dtype, t.shape) for t in flat.tensors)
    return len(encode_header(facts, placed, {})) + (placed[-1].end if placed else 0)


def write(temporary: Path, final: Path, facts: EntryFacts, flat: Flat, gate: Gate) -> None:
    """Write an entry so that it is durably there in whole or not at all.

    Raises:
        OSError: the system refused (disk full, too large, no permission); nothing is left behind.
        Exception: whatever `gate` raised; nothing is left behind.
    """
    tensors = {t.name: t for t in flat.tensors}
    placed = lay_out((t.name, t.dtype, t.shape) for t in flat.tensors)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            sums: dict[str, int] = {}
            at = len(encode_header(facts, placed, {}))
            for info in placed:
                gate()
                sums[info.name] = _write_tensor(
                    descriptor, at + info.start, tensors[info.name], gate
                )
                if info.bytes > array_codec.SMALL_BYTES:
                    # So that its way to the disk begins, beside the next one's copy and checksum.
                    forget_pages(descriptor, at + info.start, info.bytes)
            _write_all(descriptor, memoryview(encode_header(facts, placed, sums)), 0)
            gate()
            sync(descriptor)
            forget_pages(descriptor, 0, 0)
        finally:
            os.close(descriptor)
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(final.parent)


def _write_tensor(descriptor: int, at: int, tensor: Tensor, gate: Gate) -> int:
    total = 0
    for piece in array_codec.pieces(tensor):
        if len(piece) >= array_codec.PIECE_BYTES:
            gate()
        total = zlib.crc32(piece, total)
        _write_all(descriptor, piece, at)
        at += len(piece)
    return total


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def read(
    descriptor: int,
    header: Header,
    *,
    length: int,
    room_for: int,
    buffers: ArrayBuffers,
    check: bool,
) -> Generator[None, None, list[Any]]:
    """Stream an entry into fresh arrays, cut to `length` tokens on the way.

    Yields after every tensor, so that the caller may do other work in between.

    Args:
        length: tokens wanted; below the entry's own only where it is cuttable.
        room_for: tokens that the cache should hold before its arrays have to grow.
        check: compare tensor data with the checksums, too.

    Raises:
        Damage: a tensor cannot be read or does not fit.
    """
    arrays: dict[str, Any] = {}
    if header.file_bytes <= SMALL_FILE_BYTES:
        # Tensor by tensor each would wait for the disk.
        fetch_pages(descriptor, header.file_bytes)
    scalars = {name for name, _ in header.facts.scalars}
    for info in header.tensors:
        try:
            if check:
                check_tensor(descriptor, header, info)
            rows = length if info.name in header.facts.rounded else None
            arrays[info.name] = _read_tensor(descriptor, header, info, (rows, room_for), buffers)
        except OSError as error:
            raise Damage("unreadable", error.strerror or "") from error
        except (RuntimeError, MemoryError) as error:  # no memory for it: the file is not to blame
            raise Damage("unreadable", type(error).__name__) from error
        except (ValueError, TypeError, ArithmeticError) as error:
            raise Damage("structure", f"{info.name}: {type(error).__name__}") from error
        if info.bytes > array_codec.SMALL_BYTES:
            forget_pages(descriptor, header.data_start + info.start, info.bytes)
        if info.name not in scalars:
            yield
    array_codec.evaluate(arrays.values())
    forget_pages(descriptor, 0, 0)
    return array_codec.assemble(header.facts.classes, header.facts.scalars, arrays)


def _read_tensor(
    descriptor: int,
    header: Header,
    info: TensorInfo,
    rows_and_room: tuple[int | None, int],
    buffers: ArrayBuffers,
) -> Any:
    rows, room_for = rows_and_room
    at = header.data_start + info.start
    if rows is None:
        filling = buffers.new(info.dtype, info.shape)
        read_all(descriptor, filling.view, at)
        return filling.finish()
    if len(info.shape) < 3 or info.shape[2] < rows:
        raise Damage("structure", info.name)
    space = array_codec.capacity(max(rows, room_for))
    filling = buffers.new(info.dtype, (*info.shape[:2], space, *info.shape[3:]))
    if space == info.shape[2] and rows == header.facts.length:
        read_all(descriptor, filling.view, at)  # the rows beyond are zeros there, too
        return filling.finish()
    planes = prod(info.shape[:2])
    stored, made = info.bytes // planes, len(filling.view) // planes
    wanted = stored // info.shape[2] * rows
    for plane in range(planes):
        part = filling.view[plane * made : plane * made + wanted]
        read_all(descriptor, part, at + plane * stored)
        part.release()
    return filling.finish()
