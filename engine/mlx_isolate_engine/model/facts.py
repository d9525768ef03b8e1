"""What a loaded model is: size, types, context length, and what computes it."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_isolate_engine.device import backend_name, memory_bytes
from mlx_isolate_shared.wire import ModelFacts

# For models without any limit in their configuration, such as recurrent ones.
CONTEXT_WITHOUT_LIMIT = 1 << 20
# MLX counts positions in 32 bits, and the supervisor takes no count of more than 63.
CONTEXT_MAX = (1 << 31) - 1
# The minor of mlx-lm whose internals this was tested with.
TESTED_MLX_LM = "0.32"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
# What the name of a mapped library says, the one that wins first: a preloaded library comes
# before the reference one that MLX brings along.
_BLAS_NAMES = (
    ("libopenblas", "OpenBLAS"),
    ("libmkl_rt", "MKL"),
    ("libblis", "BLIS"),
    ("libblas", "reference BLAS"),
)


def facts_of(model: Any, tokenizer: Any, config: dict[str, Any]) -> ModelFacts:
    """The facts of a model that is loaded.

    Args:
        model: mlx-lm's nn.Module.
        tokenizer: mlx-lm's TokenizerWrapper.
        config: the folder's config.json.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    dtype = _dtype_of(arrays, config, mx)
    backend = backend_name()
    blas = loaded_blas() if backend == "cpu" else None
    return ModelFacts(
        architecture=str(config.get("model_type", "unknown")),
        parameters=parameter_count(model),
        weights_bytes=sum(int(array.nbytes) for array in arrays),
        dtype=dtype,
        context_length=context_length(config, getattr(tokenizer, "model_max_length", None)),
        vocab_size=vocabulary_size(config, len(tokenizer)),
        backend=backend,
        device_memory_bytes=memory_bytes(),
        blas=blas,
        has_chat_template=bool(tokenizer.has_chat_template),
        mlx_version=version("mlx"),
        mlx_lm_version=version("mlx-lm"),
        warnings=tuple(_warnings(backend, blas, dtype)),
    )


def parameter_count(model: Any) -> int:
    """Number of weights as the model computes with them: packed ones count one by one."""
    from mlx.utils import tree_flatten

    arrays: Any = tree_flatten(model.parameters())
    sizes: dict[str, int] = {str(name): int(array.size) for name, array in arrays}
    for name, module in model.named_modules():
        bits = getattr(module, "bits", None)
        if isinstance(bits, int) and f"{name}.scales" in sizes:
            sizes[f"{name}.weight"] = sizes[f"{name}.weight"] * 32 // bits
            sizes[f"{name}.scales"] = 0
            sizes.pop(f"{name}.biases", None)
    return sum(sizes.values())


def loaded_blas(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The BLAS that this process has loaded, with its file name; None where that is not known."""
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    files = {
        Path(parts[5]).name for parts in (line.split(maxsplit=5) for line in lines) if parts[5:]
    }
    for prefix, name in _BLAS_NAMES:
        for file in sorted(files):
            if file.startswith(prefix):
                return f"{name} ({file})"
    return None


def context_length(config: dict[str, Any], tokenizer_limit: object = None) -> int:
    """The longest prompt and answer together, in tokens.

    From the configuration, also where that nests the text model's part; then the tokenizer's
    limit if it is a real one; else CONTEXT_WITHOUT_LIMIT.
    """
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return min(value, CONTEXT_MAX)
    if isinstance(tokenizer_limit, int) and 0 < tokenizer_limit <= CONTEXT_WITHOUT_LIMIT:
        return tokenizer_limit
    return CONTEXT_WITHOUT_LIMIT


def vocabulary_size(config: dict[str, Any], tokenizer_size: int) -> int:
    """Number of logits a step gives: token ids lie below it."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        value = part.get("vocab_size")
        if isinstance(value, int) and value > 0:
            return value
    return tokenizer_size


def _dtype_of(arrays: list[Any], config: dict[str, Any], mx: Any) -> str:
    """The floating type that holds most bytes, or the bits of quantized weights."""
    quantization = config.get("quantization") or {}
    if isinstance(quantization, dict) and isinstance(quantization.get("bits"), int):
        return f"{quantization['bits']}-bit"
    sizes: dict[str, int] = {}
    for array in arrays:
        name = str(array.dtype).removeprefix("mlx.core.")
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[name] = sizes.get(name, 0) + int(array.nbytes)
    return max(sizes, key=lambda name: sizes[name], default="unknown")


def _warnings(backend: str, blas: str | None, dtype: str) -> list[str]:
    found: list[str] = []
    if backend == "cpu" and dtype != "float32":
        found.append(
            f"{dtype} weights are very slow on the CPU; convert the model to float32 for speed."
        )
    if backend == "cpu" and blas is not None and blas.startswith("reference"):
        remedy = "apt install libopenblas0-pthread"
        if platform.machine() in ("x86_64", "AMD64"):
            remedy += " or pip install 'mlx-isolate[mkl]'"
        found.append(f"the reference BLAS is slow; for speed: {remedy}.")
    installed = version("mlx-lm")
    if not installed.startswith(TESTED_MLX_LM + "."):
        found.append(f"mlx-lm {installed} is not the tested {TESTED_MLX_LM}.")
    return found
