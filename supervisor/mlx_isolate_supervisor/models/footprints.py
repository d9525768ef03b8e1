"""What engines of a model held in earlier runs, kept on disk: worth more than any guess.

The file is a hint from anywhere: it is checked when read, and ignored where it makes no sense.
"""

import contextlib
import hashlib
import logging
import os
import time
from pathlib import Path

import msgspec

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.model_files import model_fingerprint
from mlx_isolate_supervisor.telemetry.logs import log_event

FILE_NAME = "footprints.json"
# A larger file is not ours; more models than this are forgotten, the oldest first.
FILE_BYTES_MAX = 256 * 1024
ENTRIES_MAX = 256
# No engine holds less or more than this; a file that says so is wrong.
BYTES_MIN, BYTES_MAX = 1 << 20, 1 << 46
# A peak that was an exception is forgotten over the runs that follow.
KEPT_SHARE = 0.9
# What shapes an engine's memory besides its files.
_SHAPE = ("adapter_path", "draft_model", "decode_concurrency", "prompt_concurrency", "kv_bits")


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an engine held without its prompt cache, and when, seconds since the epoch."""

    bytes: int
    at: float


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    models: dict[str, Footprint]


def footprint_key(spec: ModelSpec) -> str:
    """What a measurement holds for: these files with these settings."""
    shape = [getattr(spec.engine, name) for name in _SHAPE]
    facts = msgspec.json.encode([spec.model, model_fingerprint(spec), shape])
    return hashlib.sha256(facts).hexdigest()[:32]


class FootprintBook:
    """Measurements by key; read once, written when a run ends.

    Args:
        path: the file; None = nothing is kept on disk.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._models = {} if path is None else _read(path)

    def measured(self, key: str) -> int | None:
        """The most that an engine held, in bytes; None where none has been measured."""
        found = self._models.get(key)
        return None if found is None else found.bytes

    def note(self, key: str, peak_bytes: int) -> None:
        """An engine has ended that held so much at most."""
        if not BYTES_MIN <= peak_bytes <= BYTES_MAX:
            return
        before = self.measured(key) or 0
        size = max(peak_bytes, int(before * KEPT_SHARE))
        self._models[key] = Footprint(bytes=size, at=time.time())
        self._save()

    def _save(self) -> None:
        """Small, whole or not at all; another daemon's newer entries are kept."""
        if self._path is None:
            return
        merged = _read(self._path)
        for key, own in self._models.items():
            if key not in merged or merged[key].at <= own.at:
                merged[key] = own
        newest = sorted(merged.items(), key=lambda entry: -entry[1].at)[:ENTRIES_MAX]
        self._models = dict(newest)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(_File(version=1, models=self._models)))
            os.replace(temporary, self._path)
        except OSError as error:
            log_event(
                "footprints.not_saved", logging.WARNING, path=self._path, reason=error.strerror
            )
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Footprint]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError:
        return {}
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError("it is too large")
        found = msgspec.json.decode(data, type=_File)
    except (ValueError, RecursionError) as error:
        log_event("footprints.ignored", logging.WARNING, path=path, reason=str(error))
        return {}
    if found.version != 1:
        return {}
    now = time.time()
    return {
        key: one
        for key, one in found.models.items()
        if BYTES_MIN <= one.bytes <= BYTES_MAX and one.at <= now
    }
