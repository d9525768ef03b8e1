"""How much memory a model will need, before it is loaded: from its files or from earlier runs.

Sizes of files only; nothing is read. What a run measured is worth more than any guess.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.devices import Device, gpu_of
from mlx_isolate_supervisor.models.disk_look import look
from mlx_isolate_supervisor.models.footprints import Footprint
from mlx_isolate_supervisor.models.model_files import files_named, model_roots
from mlx_isolate_supervisor.models.room import Need

# A loaded model beside its weights on disk: activations, the KV of running requests, buffers.
WEIGHTS_FACTOR = 1.2
# An engine without any weights: Python, MLX, a tokenizer.
PROCESS_BYTES = 300_000_000
# What a process takes of a GPU's own memory beside what MLX counts: its context, its kernels and
# graphs (1.16 to 1.20 GB each on an H200 with CUDA 13, by nvidia-smi).
GPU_PROCESS_BYTES = 1_200_000_000
WEIGHT_ENDINGS = (".safetensors", ".gguf", ".npz", ".bin")
# Files looked at; a folder with more is no model's.
FILES_MAX = 4096


def weights_bytes(spec: ModelSpec) -> int:
    """Bytes of weights on disk: the model's, its draft model's, its adapter's; 0 where unknown."""
    return look(
        f"size of {files_named(spec)}",
        lambda: sum(_folder_bytes(root) for root in model_roots(spec)),
        0,
    )


def _folder_bytes(root: Path) -> int:
    """Bytes of the weight files below `root`, each once, also where a link leads to it."""
    sizes: dict[tuple[int, int], int] = {}
    looked_at = 0
    for folder, _, names in os.walk(root):
        for name in names:
            looked_at += 1
            if name.endswith(WEIGHT_ENDINGS):
                try:
                    facts = os.stat(os.path.join(folder, name))
                except OSError:
                    continue
                sizes[(facts.st_dev, facts.st_ino)] = facts.st_size
        if looked_at >= FILES_MAX:
            break
    return sum(sizes.values())


def unmeasured_bytes(weights: int) -> int:
    """What an engine with so many bytes of weights will hold, where none has been measured."""
    return PROCESS_BYTES + _loaded_bytes(weights)


def _loaded_bytes(weights: int) -> int:
    """What a model with so many bytes of weights takes, without the process that holds it."""
    return int(weights * WEIGHTS_FACTOR)


def need_of(
    spec: ModelSpec, measured: Footprint | None, devices: Mapping[str, Device] | None = None
) -> Need:
    """What an engine of `spec` will hold, its share of the prompt cache included.

    Args:
        measured: the most that an engine of it held in earlier runs, without its prompt cache;
            None where none has been measured.
        devices: the GPUs that are known.
    """
    cache = spec.engine.prompt_cache_bytes or 0
    # The disk is looked at only where no measurement says it.
    own = unmeasured_bytes(weights_bytes(spec)) if measured is None else measured.bytes
    gpu = gpu_of(spec)
    device = (devices or {}).get(gpu)
    if device is None or not device.has_own_memory:
        return Need(bytes=own + cache)
    # Of the process itself, GPU_PROCESS_BYTES lie there.
    measured_there = 0 if measured is None else measured.gpu_bytes
    held = measured_there or _loaded_bytes(weights_bytes(spec))
    return Need(bytes=own, gpu=gpu, gpu_bytes=GPU_PROCESS_BYTES + held + cache)
