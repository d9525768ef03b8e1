"""GPUs as engines report them, kept on disk: the supervisor has no way to ask for them itself.

The file is a hint from anywhere: it is checked when read, and ignored where it makes no sense.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from mlx_isolate_shared.wire import ModelFacts
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.state_file import read_state, write_state
from mlx_isolate_supervisor.telemetry.logs import log_event

FILE_NAME = "devices.json"
# More GPUs than this are not one machine's.
DEVICES_MAX = 64
# No GPU has less or more memory than this.
BYTES_MIN, BYTES_MAX = 1 << 28, 1 << 46


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        backend: what MLX calls it.
        memory_bytes: what engines may use: of the machine's memory, or of its own.
    """

    backend: str
    memory_bytes: int

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the machine's."""
        return self.backend.startswith("cuda")


def device_of(facts: ModelFacts) -> Device:
    """What an engine computes on, as it says; without memory where that is no GPU."""
    return Device(backend=facts.backend, memory_bytes=facts.device_memory_bytes)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    devices: dict[str, Device]


def gpu_of(spec: ModelSpec) -> str:
    """The GPU that an engine computes on, as its environment names it; empty = the first."""
    named = spec.env.get("CUDA_VISIBLE_DEVICES", "")
    return re.split(r"[,\s]", named.strip(), maxsplit=1)[0][:64]


class DeviceBook:
    """What is known of the GPUs; read once, written when a report says otherwise.

    Args:
        path: the file; None = nothing is kept on disk.

    Attributes:
        known: by the name that `gpu_of` gives them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.known: Mapping[str, Device] = {} if path is None else _read(path)

    def note(self, gpu: str, facts: ModelFacts) -> bool:
        """An engine on `gpu` has become ready; whether that is news."""
        found = device_of(facts)
        known = dict(self.known)
        if _is_possible(found):
            known[gpu] = found
        else:
            # There is none any more, or it does not say.
            known.pop(gpu, None)
        if known == self.known or len(known) > DEVICES_MAX:
            return False
        self.known = known
        log_event("device.found", gpu=gpu or None, backend=found.backend, bytes=found.memory_bytes)
        if self._path is not None:
            write_state(self._path, _File(version=1, devices=known))
        return True


def _is_possible(device: Device) -> bool:
    return BYTES_MIN <= device.memory_bytes <= BYTES_MAX and len(device.backend) <= 64


def _read(path: Path) -> dict[str, Device]:
    found = read_state(path, _File)
    if found is None or found.version != 1 or len(found.devices) > DEVICES_MAX:
        return {}
    return {gpu: one for gpu, one in found.devices.items() if _is_possible(one)}
