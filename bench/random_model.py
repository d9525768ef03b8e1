"""Builds a llama of random bfloat16 weights in the size of a known model, for benches on a GPU.

    python -m bench.random_model FOLDER --size 8b

Random weights do where only shapes matter; the rows of tokens that the small tokenizer does not
know are zero, so that greedy answers are printable and never end by themselves.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCABULARY = 128256
CONTEXT = 131072


def build(folder: Path, size: str) -> Path:
    """Write configuration, tokenizer and weights of `size` into `folder`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tests.material.models import ModelSpec, build_model, printable_ids

    build_model(folder, ModelSpec(kind="full", context=CONTEXT))
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text()) | SIZES[size]
    config |= {"vocab_size": VOCABULARY, "dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    model: Any = llama.Model(llama.ModelArgs.from_dict(config))
    mx.random.seed(1)
    parameters: Any = tree_flatten(model.parameters())
    weights = {name: _random(array) for name, array in parameters}
    known = mx.zeros((VOCABULARY, 1), mx.bfloat16)
    known[mx.array(printable_ids())] = 1.0
    weights["lm_head.weight"] = weights["lm_head.weight"] * known
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _random(array: Any) -> Any:
    import mlx.core as mx

    values = mx.random.normal(array.shape) * 0.02 if array.ndim > 1 else mx.ones(array.shape)
    return values.astype(mx.bfloat16)


def main(arguments: list[str]) -> int:
    """Build one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to, about 3 GB for 1b and 16 GB for 8b")
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="1b", help="of which model (default 1b)"
    )
    options = parser.parse_args(arguments)
    print(build(options.folder, options.size))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
