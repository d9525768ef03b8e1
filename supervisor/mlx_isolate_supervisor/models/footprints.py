"""What engines of a model held in earlier runs, kept on disk: worth more than any guess.

The file is a hint from anywhere: it is checked when read, and ignored where it makes no sense.
"""

import hashlib
import time
from pathlib import Path

import msgspec

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.model_files import model_fingerprint
from mlx_isolate_supervisor.models.state_file import read_state, write_state

FILE_NAME = "footprints.json"
# More models than this are forgotten, the oldest first.
ENTRIES_MAX = 256
# No engine holds less or more than this; a file that says so is wrong.
BYTES_MIN, BYTES_MAX = 1 << 20, 1 << 46
# A peak that was an exception is forgotten over the runs that follow.
KEPT_SHARE = 0.9
# What shapes an engine's memory besides its files.
_SHAPE = ("adapter_path", "draft_model", "decode_concurrency", "prompt_concurrency", "kv_bits")


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an engine held without its prompt cache, and when, seconds since the epoch.

    Attributes:
        gpu_bytes: of its GPU's own memory; 0 where it has none.
    """

    bytes: int
    gpu_bytes: int = 0
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

    def measured(self, key: str) -> Footprint | None:
        """The most that an engine held; None where none has been measured."""
        return self._models.get(key)

    def note(self, key: str, peak_bytes: int, gpu_peak_bytes: int = 0) -> None:
        """An engine has ended that held so much at most."""
        if not (BYTES_MIN <= peak_bytes <= BYTES_MAX and 0 <= gpu_peak_bytes <= BYTES_MAX):
            return
        before = self.measured(key) or Footprint(bytes=0, at=0.0)
        self._models[key] = Footprint(
            bytes=max(peak_bytes, int(before.bytes * KEPT_SHARE)),
            gpu_bytes=max(gpu_peak_bytes, int(before.gpu_bytes * KEPT_SHARE)),
            at=time.time(),
        )
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
        write_state(self._path, _File(version=1, models=self._models))


def _read(path: Path) -> dict[str, Footprint]:
    found = read_state(path, _File)
    if found is None or found.version != 1:
        return {}
    now = time.time()
    return {key: one for key, one in found.models.items() if _is_possible(one) and one.at <= now}


def _is_possible(one: Footprint) -> bool:
    return BYTES_MIN <= one.bytes <= BYTES_MAX and 0 <= one.gpu_bytes <= BYTES_MAX
