"""From what a user calls a model to a local folder that holds it whole."""

import os
from collections.abc import Callable
from pathlib import Path

from mlx_isolate_engine.device import backend_name
from mlx_isolate_engine.model.demo import ensure_demo
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.folder import check_folder, is_local
from mlx_isolate_engine.model.hub import download
from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]

DEMO = "demo"


def resolve_model(model: str, cache_home: Path, report: Report) -> Path:
    """The local folder of `model`; downloads or converts where needed.

    Only a repo id may touch the network, and only where no complete copy is in the hub's cache:
    an engine that starts again serves the files it served before, whatever the hub does.

    Args:
        model: `demo`, an absolute folder, or a hub repo id (`owner/name`).
        cache_home: the user's cache folder, for the converted demo.
        report: gets `Loading` lines of the stages `download` and `convert`; one at a time, though
            from several threads.

    Raises:
        ModelError: it does not exist, is broken or cannot be had.
    """
    if model == DEMO:
        dtype = "float32" if backend_name() == "cpu" else "bfloat16"
        return ensure_demo(cache_home, dtype, report)
    if is_local(model):
        folder = Path(os.path.expanduser(model))
        check_folder(folder)
        return folder
    if model.endswith((".safetensors", ".gguf", ".bin")):
        raise ModelError("model_missing", f"{model} is a file; name the folder that holds it.")
    return download(model, report)
