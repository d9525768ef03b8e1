"""What a standby does before it knows its start: imports, and one model's tokenizer.

Nothing here may fail: what cannot be done ahead is done, and reported, by the load itself.
"""

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from mlx_isolate_engine.generation.few_shapes import NO_THRASHING_CHECK
from mlx_isolate_engine.model.errors import ModelError, first_sentence
from mlx_isolate_engine.model.library_scan import speed_up_transformers
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Prepare, Start

log = logging.getLogger("engine.ahead")

_MODEL_MODULES = (
    "mlx_isolate_engine.cache.build",
    "mlx_isolate_engine.completion.service",
    "mlx_isolate_engine.generation.thread",
    "mlx_isolate_engine.model.load",
    "mlx_isolate_engine.model.resolve",
)


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer with everything that it depends on."""

    folder: Path
    settings: EngineSettings
    tokenizer: Any

    def fits(self, folder: Path, start: Start) -> bool:
        """Whether it is what a load of `folder` for `start` would make."""
        mine, theirs = self.settings, start.settings
        return folder == self.folder and (
            mine.trust_remote_code == theirs.trust_remote_code
            and mine.chat_template == theirs.chat_template
            and mine.use_default_chat_template == theirs.use_default_chat_template
        )


def import_model_libraries() -> None:
    """Import what costs seconds: mlx, mlx_lm and what stands on them.

    Raises:
        ModelError: `mlx_missing`.
    """
    os.environ.setdefault(*NO_THRASHING_CHECK)
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise ModelError(
            "mlx_missing",
            f"MLX cannot be imported ({first_sentence(error)}); install it: pip install "
            "'mlx[cpu]', for an NVIDIA GPU 'mlx[cuda13]' or 'mlx[cuda12]', on macOS mlx.",
        ) from error
    speed_up_transformers()
    for name in _MODEL_MODULES:
        importlib.import_module(name)


def prepare_ahead(prepare: Prepare) -> Ahead | None:
    """Import, and load the tokenizer of the model that `prepare` names, where its files lie here."""
    import_model_libraries()
    if prepare.model is None:
        return None
    try:
        folder = _folder_that_is_here(prepare)
        if folder is None:
            return None
        tokenizer = _load_tokenizer(folder, prepare.settings)
    except (ModelError, OSError) as error:
        log.info("standby.tokenizer_left reason=%s", error)
        return None
    return Ahead(folder=folder, settings=prepare.settings, tokenizer=tokenizer)


def _folder_that_is_here(prepare: Prepare) -> Path | None:
    """The model's folder, if it can be had without converting or downloading."""
    from mlx_isolate_engine.model.demo import demo_folder
    from mlx_isolate_engine.model.folder import is_local
    from mlx_isolate_engine.model.resolve import DEMO, resolve_model

    model = prepare.model
    assert model is not None
    cache_home = Path(prepare.cache_home)
    if model == DEMO:
        folders = (demo_folder(cache_home, dtype) for dtype in ("float32", "bfloat16"))
        if not any(folder.exists() for folder in folders):
            return None
    elif not is_local(model):
        return None
    return resolve_model(model, cache_home, lambda _: None)


def _load_tokenizer(folder: Path, settings: EngineSettings) -> Any:
    from mlx_lm.utils import load_config

    from mlx_isolate_engine.model.tokenizer import load_tokenizer

    return load_tokenizer(folder, settings, load_config(folder).get("eos_token_id"))
