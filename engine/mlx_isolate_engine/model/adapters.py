"""Adapters: one that belongs to the model for good, and a rack of those that requests choose by name.

A mounted adapter's layers stand in the model in place of the plain ones, which they hold on to; so
mounting another swaps references and moves no weights.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.errors import FOREIGN_ERRORS, ModelError, first_sentence

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

Layers = list[tuple[str, Any]]


def add_adapter(model: Any, path: Path) -> None:
    """Put an adapter's layers into the model.

    Raises:
        ModelError: the folder is incomplete, broken or another model's.
    """
    from mlx_lm.utils import load_adapters

    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / name).is_file():
                raise ModelError("adapter_broken", f"the adapter folder {path} has no {name}.")
        load_adapters(model, str(path))
        model.eval()
    except (*FOREIGN_ERRORS, json.JSONDecodeError) as error:
        raise ModelError(
            "adapter_broken", f"cannot use the adapter {path}: {first_sentence(error)}"
        ) from error


class AdapterRack:
    """The adapters of one model, at most one of them mounted; for the generation thread.

    Args:
        model: mlx-lm's, as loaded; `None` mounts it so again.
        folders: where each name's adapter lies.

    Raises:
        ModelError: an adapter cannot be used.
    """

    def __init__(self, model: Any, folders: Mapping[str, str]) -> None:
        self._model = model
        self._mounted: str | None = None
        self._plain: dict[str, Layers] = {}
        self._adapted: dict[str, Layers] = {}
        self.digests: dict[str, str] = {}
        for name, folder in folders.items():
            self._load(name, Path(folder).expanduser())

    def mount(self, name: str | None) -> None:
        """Put these layers in; harmless if they are in."""
        if name == self._mounted:
            return
        if self._mounted is not None:
            self._put(self._plain[self._mounted])
        if name is not None:
            self._put(self._adapted[name])
        self._mounted = name

    def _load(self, name: str, folder: Path) -> None:
        import mlx.core as mx

        before = dict(self._model.named_modules())
        add_adapter(self._model, folder)
        if _is_full(folder):
            raise ModelError(
                "adapter_broken",
                f"the adapter {folder} is a full fine-tune; serve it as a model of its own.",
            )
        adapted = [
            (path, module)
            for path, module in self._model.named_modules()
            if path in before and before[path] is not module
        ]
        # A layer that was put in has parts of its own; only the layer itself is swapped.
        tops = {path for path, _ in adapted}
        adapted = [each for each in adapted if not _has_parent(each[0], tops)]
        self._adapted[name] = adapted
        self._plain[name] = [(path, before[path]) for path, _ in adapted]
        mx.eval([module.parameters() for _, module in adapted])
        self._put(self._plain[name])
        self.digests[name] = _digest(folder)

    def _put(self, layers: Layers) -> None:
        from mlx.utils import tree_unflatten

        self._model.update_modules(tree_unflatten(layers))


def _has_parent(path: str, others: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:length]) in others for length in range(1, len(parts)))


def _is_full(folder: Path) -> bool:
    config: Any = json.loads((folder / CONFIG_FILE).read_text())
    return bool(config.get("fine_tune_type") == "full")


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()
