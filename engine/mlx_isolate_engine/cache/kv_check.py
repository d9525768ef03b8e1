"""Opening and checking cache files without a model: header, length, checksums."""

import os
import stat
import zlib
from pathlib import Path

from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.kv_file import (
    EntryFacts,
    Header,
    TensorInfo,
    decode_facts,
    decode_header,
    header_length,
)

_SCRATCH_BYTES = 4 * 1024 * 1024


def open_entry(path: Path) -> tuple[int, Header]:
    """Open a file without following a link; its header and length are checked.

    Raises:
        Damage: nothing stays open.
    """
    descriptor = _open(path)
    try:
        header = decode_header(_read_header(descriptor))
        actual = os.fstat(descriptor).st_size
        if actual != header.file_bytes:
            raise Damage("length", f"{actual} bytes of {header.file_bytes}")
        return descriptor, header
    except OSError as error:
        os.close(descriptor)
        raise Damage("unreadable", error.strerror or "") from error
    except Damage:
        os.close(descriptor)
        raise


def read_facts(path: Path) -> tuple[EntryFacts, int]:
    """What a file says about its entry, and its length; see kv_file.decode_facts.

    Raises:
        Damage: it cannot be used.
    """
    descriptor = _open(path)
    try:
        size = os.fstat(descriptor).st_size
        return decode_facts(_read_header(descriptor), size), size
    except OSError as error:
        raise Damage("unreadable", error.strerror or "") from error
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        # Not blocking: somebody may have put a pipe there, which would hold the opener for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Damage("vanished") from error
    except OSError as error:
        raise Damage("unreadable", error.strerror or "") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damage("unreadable", "not a regular file")
    return descriptor


def read_header(path: Path) -> Header:
    """The checked header of a file.

    Raises:
        Damage: it cannot be used.
    """
    descriptor, header = open_entry(path)
    os.close(descriptor)
    return header


def _read_header(descriptor: int) -> bytes:
    first = os.pread(descriptor, 16 * 1024, 0)
    total = header_length(first)
    if total > os.fstat(descriptor).st_size:
        raise Damage("length", "shorter than its header")
    return first + os.pread(descriptor, total - len(first), len(first))


def verify(path: Path) -> Header:
    """Check a file wholly, tensor data too.

    Raises:
        Damage: it cannot be used.
    """
    descriptor, header = open_entry(path)
    try:
        for info in header.tensors:
            check_tensor(descriptor, header, info)
    finally:
        os.close(descriptor)
    return header


def check_tensor(descriptor: int, header: Header, info: TensorInfo) -> None:
    """Compare a tensor's bytes with its checksum.

    Raises:
        Damage: `data` or `length`.
    """
    scratch = memoryview(bytearray(min(_SCRATCH_BYTES, info.bytes)))
    total = 0
    for start in range(0, info.bytes, _SCRATCH_BYTES):
        part = scratch[: min(_SCRATCH_BYTES, info.bytes - start)]
        read_all(descriptor, part, header.data_start + info.start + start)
        total = zlib.crc32(part, total)
    if total != header.sums[info.name]:
        raise Damage("data", info.name)


def read_all(descriptor: int, view: memoryview, at: int) -> None:
    """Fill a view from a place in a file.

    Raises:
        Damage: `length`, the file ends early.
        OSError: the system refused.
    """
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], at + done)
        if got == 0:
            raise Damage("length", "ends early")
        done += got
