"""What a model folder holds, checked before anything heavy reads it.

Pure file checks: no mlx, no network. The weights' own numbers are checked when they are loaded.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.errors import ModelError

# A header that claims more is damage: it would be read into memory whole.
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000
CONFIG_BYTES_MAX = 10_000_000
# Layers that nobody doubts. Beyond, each must have a weight: they are built before weights are
# read, and some millions of them would fill the machine's memory.
LAYERS_MAX = 1000
INDEX = "model.safetensors.index.json"
# A tokenizer has at least one of these; whether it is whole is the libraries' to judge.
TOKENIZER_FILES = ("tokenizer*", "tokenization_*", "vocab*", "*.model", "*.tiktoken")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelFiles:
    """A folder that looks whole.

    Attributes:
        config: config.json as it is.
        weights: the weight files, sorted.
        weights_bytes: their size on disk, in bytes.
    """

    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    weights_bytes: int


def check_folder(folder: Path) -> ModelFiles:
    """Check that config and weights are there, readable and complete.

    Raises:
        ModelError: `model_missing` or `model_broken`, naming the file at fault.
    """
    try:
        return _check(folder)
    except OSError as error:
        name = error.filename or folder
        raise ModelError("model_broken", f"cannot read {name}: {error.strerror}.") from error


def _check(folder: Path) -> ModelFiles:
    if not folder.exists():
        raise ModelError("model_missing", f"the model folder {folder} does not exist.")
    if not folder.is_dir():
        raise ModelError("model_missing", f"{folder} is a file; name the folder that holds it.")
    _check_kinds(folder)
    config = _read_config(folder)
    weights = tuple(sorted(folder.glob("model*.safetensors")))
    expected = _index_files(folder)
    missing = sorted(expected - {path.name for path in weights})
    if missing:
        raise ModelError(
            "model_broken",
            f"{folder} lacks {len(missing)} of the weight files its index names, "
            f"first {missing[0]}; copy or download the model again.",
        )
    if not weights:
        raise ModelError(
            "model_broken", f"{folder} holds no model*.safetensors file{_other_format(folder)}."
        )
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(
            "model_broken",
            f"{folder} holds no tokenizer (tokenizer.json or the like); copy or download it "
            "beside the weights.",
        )
    tensors = sum(map(_check_weights, weights))
    if _layers(config) > max(LAYERS_MAX, tensors):
        raise ModelError(
            "model_broken", f"{folder}/config.json claims more layers than there are weights."
        )
    size = sum(path.stat().st_size for path in weights)
    return ModelFiles(folder=folder, config=config, weights=weights, weights_bytes=size)


def _check_kinds(folder: Path) -> None:
    """Refuse pipes and the like, whose readers would wait for ever."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError("model_broken", f"{path} is neither a file nor a folder.")


def _other_format(folder: Path) -> str:
    """What to say of weights in a format that is not read; empty where there are none."""
    for suffix, name in ((".bin", "PyTorch"), (".pth", "PyTorch"), (".gguf", "GGUF")):
        if any(folder.glob(f"*{suffix}")):
            return f" ({name}'s {suffix} files are not read; get the model as safetensors)"
    return ""


def _layers(config: dict[str, Any]) -> int:
    """How many layers the configuration claims, or a model's part of it."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    claims = [part.get("num_hidden_layers") for part in parts]
    return max((claim for claim in claims if isinstance(claim, int)), default=0)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        hint = " (a GGUF file alone cannot be served)" if any(folder.glob("*.gguf")) else ""
        raise ModelError("model_broken", f"{folder} has no config.json{hint}.")
    config = _read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError("model_broken", f"{path} does not say which model_type it is.")
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ModelError("model_broken", f"{path} is too large to be a configuration.")
    try:
        value: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError("model_broken", f"{path} is not valid JSON.") from error
    if not isinstance(value, dict):
        raise ModelError("model_broken", f"{path} does not hold a JSON object.")
    return {str(key): item for key, item in value.items()}


def _index_files(folder: Path) -> set[str]:
    """File names that the index needs; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return set()
    weight_map = _read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("model_broken", f"{path} has no weight_map.")
    return {str(name) for name in weight_map.values()}


def _check_weights(path: Path) -> int:
    """Compare a safetensors file's size with what its header says; how many tensors it holds."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise ModelError(
                "model_broken",
                f"{path} is a pointer of Git LFS and not the file itself; run git lfs pull in "
                "its folder, or download it again.",
            )
        length = int.from_bytes(start[:8], "little")
        if not 2 <= length <= min(size - 8, SAFETENSORS_HEADER_BYTES_MAX):
            raise ModelError("model_broken", f"{path} is cut off or no safetensors file.")
        file.seek(8)
        header = file.read(length)
    try:
        tensors = json.loads(header)
        ends = [tensor["data_offsets"][1] for key, tensor in tensors.items() if key[:2] != "__"]
        if not all(type(end) is int for end in ends):
            raise ValueError("an offset is no whole number")
        end = max(ends, default=0)
        is_whole = size == 8 + length + end
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelError("model_broken", f"the header of {path} is damaged.") from error
    if not is_whole:
        raise ModelError(
            "model_broken",
            f"{path} is cut off: {size} bytes where its header says {8 + length + end}; "
            "copy or download it again.",
        )
    return len(ends)


def is_local(model: str) -> bool:
    """Whether a MODEL argument names a folder rather than a hub repo id."""
    return model.startswith(("/", "./", "../", "~")) or os.path.isdir(model)
