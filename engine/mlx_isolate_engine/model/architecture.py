"""Whether mlx-lm can build what a model folder holds, before anything is built or read.

Loads mlx-lm only for a name that none of its modules has: that takes seconds.
"""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.folder import ModelFiles


def check_architecture(files: ModelFiles, *, trust_remote_code: bool) -> None:
    """Refuse unknown architectures, and code from the folder that nobody trusts.

    Raises:
        ModelError: `model_untrusted` or `model_unsupported`.
    """
    if files.config.get("model_file") is not None:
        if trust_remote_code:
            return
        raise ModelError(
            "model_untrusted",
            f"the model in {files.folder} wants to run code of its own; "
            "give --trust-remote-code if you trust it.",
        )
    given = str(files.config["model_type"])
    if not _is_module(given) and not _is_module(_name_in_library(given)):
        raise ModelError(
            "model_unsupported",
            f"mlx-lm {version('mlx-lm')} has no model type {given!r}; a newer one may.",
        )


def _is_module(name: str) -> bool:
    # The name becomes a module's name: nothing but one plain word may.
    if re.fullmatch(r"[\w-]+", name) is None:
        return False
    # To ask for a module below it would load the library.
    library = find_spec("mlx_lm")
    folders = [] if library is None else library.submodule_search_locations or []
    return any(Path(folder, "models", f"{name}.py").is_file() for folder in folders)


def _name_in_library(given: str) -> str:
    from mlx_lm.utils import MODEL_REMAPPING

    return str(MODEL_REMAPPING.get(given, given))
