"""Gemma 3 270M's weights from its GGUF file, dequantized tensor by tensor into safetensors files.

The source's names map one to one to mlx-lm's `gemma3_text`. Its norm weights are stored with one
added, which mlx-lm adds itself. Written in a stream: no more than one chunk of rows is in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.demo_source import GemmaShape
from mlx_isolate_engine.model.errors import ModelError

# Rows dequantized at a time: 16 Ki rows of the embedding are 42 MB in float32.
CHUNK_ROWS = 16_384
# Layers in one weight file, which is what a resumed conversion need not do again.
SHARD_LAYERS = 6


@dataclass(frozen=True)
class Tensor:
    """One tensor to convert; `is_norm` where one is to be subtracted."""

    source: str
    name: str
    shape: tuple[int, ...]
    is_norm: bool

    @property
    def size(self) -> int:
        """Number of values."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def shards(shape: GemmaShape) -> dict[str, list[Tensor]]:
    """Weight file names with their tensors: the embedding, then six layers a file."""
    embedding = (shape.vocab, shape.hidden)
    groups = [[Tensor("token_embd.weight", "model.embed_tokens.weight", embedding, False)]]
    for first in range(0, shape.layers, SHARD_LAYERS):
        layers = range(first, min(first + SHARD_LAYERS, shape.layers))
        groups.append([tensor for layer in layers for tensor in _layer_tensors(layer, shape)])
    groups[-1].append(Tensor("output_norm.weight", "model.norm.weight", (shape.hidden,), True))
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _layer_tensors(layer: int, shape: GemmaShape) -> list[Tensor]:
    hidden, head = shape.hidden, shape.head_dim
    queries, keys = shape.heads * head, shape.kv_heads * head
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "attn_q_norm": ("self_attn.q_norm", (head,)),
        "attn_k_norm": ("self_attn.k_norm", (head,)),
        "post_attention_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_norm": ("pre_feedforward_layernorm", (hidden,)),
        "post_ffw_norm": ("post_feedforward_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (shape.ffn, hidden)),
        "ffn_up": ("mlp.up_proj", (shape.ffn, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, shape.ffn)),
    }
    return [
        Tensor(
            source=f"blk.{layer}.{source}.weight",
            name=f"model.layers.{layer}.{name}.weight",
            shape=size,
            is_norm=source.endswith("_norm"),
        )
        for source, (name, size) in names.items()
    ]


def item_size(dtype: str) -> int:
    """Bytes of one value: `float32` 4, `bfloat16` 2."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def index(shape: GemmaShape, dtype: str) -> dict[str, Any]:
    """model.safetensors.index.json."""
    weight_map = {tensor.name: file for file, group in shards(shape).items() for tensor in group}
    values = sum(tensor.size for group in shards(shape).values() for tensor in group)
    return {"metadata": {"total_size": values * item_size(dtype)}, "weight_map": weight_map}


def check_source(reader: Any, shape: GemmaShape) -> dict[str, Any]:
    """The source's tensors by name, after comparing names and shapes with what is expected.

    Raises:
        ModelError: `demo_broken`.
    """
    found = {str(tensor.name): tensor for tensor in reader.tensors}
    for group in shards(shape).values():
        for tensor in group:
            source = found.get(tensor.source)
            # GGUF names the fastest dimension first.
            if source is None or tuple(int(n) for n in source.shape[::-1]) != tensor.shape:
                raise ModelError(
                    "demo_broken", f"the demo model's source has no fitting {tensor.source}."
                )
    return found


def write_shard(
    path: Path,
    group: list[Tensor],
    sources: dict[str, Any],
    dtype: str,
    moved: Callable[[int], None],
) -> str:
    """Write one safetensors file, flushed to the disk, and return its SHA-256.

    Args:
        path: written as it is; give a temporary name and rename it after.
        group: the tensors of this file.
        sources: from `check_source`.
        dtype: `float32` or `bfloat16`.
        moved: called with the bytes of each chunk written.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = _header(group, dtype)
        digest.update(header)
        file.write(header)
        for tensor in group:
            for chunk in _chunks(tensor, sources[tensor.source], dtype):
                digest.update(chunk)
                file.write(chunk)
                moved(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(group: list[Tensor], dtype: str) -> bytes:
    name = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in group:
        start, end = end, end + tensor.size * item_size(dtype)
        entries[tensor.name] = {"dtype": name, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Values begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor, source: Any, dtype: str) -> Iterator[memoryview]:
    """The tensor's bytes in the target type, in row order."""
    import numpy as np
    from gguf.quants import dequantize

    rows = source.data if len(tensor.shape) > 1 else source.data[None, :]
    for start in range(0, len(rows), CHUNK_ROWS):
        values: Any = dequantize(rows[start : start + CHUNK_ROWS], source.tensor_type)
        values = np.ascontiguousarray(values, dtype=np.float32)
        if tensor.is_norm:
            values = values - np.float32(1.0)
        if dtype == "bfloat16":
            values = _bfloat16(values)
        yield memoryview(values).cast("B")


def _bfloat16(values: Any) -> Any:
    """The upper halves of float32 values, rounded to nearest, ties to even; uint16."""
    import numpy as np

    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
