"""How much memory a model will need, before it is loaded: from its files or from earlier runs.

Sizes of files only; nothing is read. What a run measured is worth more than any guess.
"""

import os
from pathlib import Path

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.model_files import model_roots

# A loaded model beside its weights on disk: activations, the KV of running requests, buffers.
WEIGHTS_FACTOR = 1.2
# An engine without any weights: Python, MLX, a tokenizer.
PROCESS_BYTES = 300_000_000
WEIGHT_ENDINGS = (".safetensors", ".gguf", ".npz", ".bin")
# Files looked at; a folder with more is no model's.
FILES_MAX = 4096


def weights_bytes(spec: ModelSpec) -> int:
    """Bytes of weights on disk: the model's, its draft model's, its adapter's; 0 where unknown."""
    return sum(_folder_bytes(root) for root in model_roots(spec))


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


def need_bytes(spec: ModelSpec, measured: int | None) -> int:
    """What an engine of `spec` will hold, its share of the prompt cache included.

    Args:
        measured: the most that an engine of it held in earlier runs, without its prompt cache;
            None where none has been measured.
    """
    own = measured
    if own is None:
        own = PROCESS_BYTES + int(weights_bytes(spec) * WEIGHTS_FACTOR)
    return own + (spec.engine.prompt_cache_bytes or 0)
