"""Small files of what earlier runs have learnt: written whole or not at all, read with suspicion."""

import contextlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from mlx_isolate_supervisor.telemetry.logs import log_event

# A larger file is not ours.
FILE_BYTES_MAX = 256 * 1024

_Content = TypeVar("_Content", bound=msgspec.Struct)


def read_state(path: Path, kind: type[_Content]) -> _Content | None:
    """What the file holds; None where there is none, or it makes no sense (which is logged)."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError:
        return None
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError("it is too large")
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        log_event("state.ignored", logging.WARNING, path=path, reason=str(error))
        return None


def write_state(path: Path, content: msgspec.Struct) -> None:
    """Replace the file; what cannot be written is logged, and costs nothing else."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(content))
        os.replace(temporary, path)
    except OSError as error:
        log_event("state.not_saved", logging.WARNING, path=path, reason=error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
