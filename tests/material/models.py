"""Tiny float32 models made on the spot, seeded, in folders that `mlx_lm.load` reads in ms.

`build_model` is the entry; the session fixture `model_folder` in tests/conftest.py caches by spec.
Random models write printable ASCII for ever: the output rows of special tokens and of bytes that
are no printable character are zero, so that greedy decoding never picks them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from tests.material.architectures import config_of, random_weights
from tests.material.parrot import parrot_config, parrot_weights
from tests.material.templates import TEMPLATES
from tests.material.tokenizer import END, VOCAB_SIZE, merge_texts, write_tokenizer

Kind = Literal["full", "sliding", "recurrent", "hybrid", "cache_list", "shared_kv", "parrot"]


@dataclass(frozen=True)
class ModelSpec:
    """What to build; equal specs give equal bytes.

    Attributes:
        kind: full (llama, KVCache) · sliding (gemma3_text, RotatingKVCache mixed with KVCache) ·
            recurrent (mamba2, ArraysCache) · hybrid (qwen3_next, ArraysCache mixed with KVCache) ·
            cache_list (falcon_h1, CacheList) · shared_kv (gemma4_text, fewer caches than layers) ·
            parrot (see tests/material/parrot.py).
        template: a key of TEMPLATES.
        context: max_position_embeddings, in tokens.
        window: sliding window of the kinds that have one, in tokens.
        shards: number of weight files; above 1 with an index.
    """

    kind: Kind = "full"
    seed: int = 0
    template: str = "plain"
    context: int = 2048
    hidden: int = 64
    layers: int = 4
    window: int = 16
    shards: int = 1


# Slow enough (about 10 ms a token with the reference BLAS, some ms with OpenBLAS) that a test can
# act in the middle of a stream, with a context for thousands of tokens.
SLOW = ModelSpec(kind="full", hidden=384, layers=6, context=32768)
# Two layers are one of each sort that a kind mixes; every one more costs its share of every token.
FULL = ModelSpec(kind="full", layers=2)
SLIDING = ModelSpec(kind="sliding")
RECURRENT = ModelSpec(kind="recurrent", layers=2)
HYBRID = ModelSpec(kind="hybrid", layers=2)
CACHE_LIST = ModelSpec(kind="cache_list", layers=2)
SHARED_KV = ModelSpec(kind="shared_kv")
PARROT = ModelSpec(kind="parrot", context=8192)
# One model for each kind of prompt cache.
CACHE_KINDS = {
    "full": FULL,
    "sliding": SLIDING,
    "recurrent": RECURRENT,
    "hybrid": HYBRID,
    "cache_list": CACHE_LIST,
    "shared_kv": SHARED_KV,
}
# Why no test of one runs there (mlx 0.32.4; the engine refuses to start).
NO_KV_BITS_ON_CUDA = "MLX's kernels there take no slice of a buffer, which a quantized cache is"
# The width that a quantized cache needs for its groups of 32.
QUANTIZABLE = ModelSpec(kind="full", hidden=128)


def build_model(folder: Path, spec: ModelSpec) -> Path:
    """Build `spec` into `folder` (made if missing) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if spec.kind == "parrot":
        config, weights = parrot_config(spec.context), parrot_weights()
    else:
        config = config_of(spec.kind, spec.hidden, spec.layers, spec.window)
        config["max_position_embeddings"] = spec.context
        weights = random_weights(spec.kind, config, spec.seed)
        _silence_unprintable(weights)
    config |= {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(folder, weights, spec.shards)
    write_tokenizer(folder, TEMPLATES[spec.template], spec.context)
    return folder


def printable_ids() -> list[int]:
    """Ids of tokens that a random model may write: printable ASCII, newline and merges."""
    return [10, *range(32, 127), *sorted(merge_texts())]


def _silence_unprintable(weights: dict[str, np.ndarray[Any, Any]]) -> None:
    name = next(name for name in weights if name.endswith("lm_head.weight"))
    silent = np.ones(VOCAB_SIZE, dtype=bool)
    silent[printable_ids()] = False
    weights[name][silent] = 0.0


def _write_weights(folder: Path, weights: dict[str, np.ndarray[Any, Any]], shards: int) -> None:
    metadata = {"format": "mlx"}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata=metadata)
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata=metadata)
    size = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
