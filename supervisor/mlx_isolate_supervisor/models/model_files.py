"""A cheap fingerprint of a model's files, to see whether a model that cannot work was repaired.

Names, sizes and times only; nothing is read. Not the cache's fingerprint, which knows contents.
"""

import os
from pathlib import Path

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.disk_look import look

# Entries looked at; a folder with more is judged by its first ones.
ENTRIES_MAX = 512

Fingerprint = tuple[tuple[str, int, int], ...]


def hub_folder(repo: str) -> Path:
    """Where huggingface_hub keeps a repo, by the variables that it honours."""
    caches = _named("XDG_CACHE_HOME", "~/.cache")
    home = _named("HF_HOME", os.path.join(caches, "huggingface"))
    older = _named("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(_named("HF_HUB_CACHE", older)) / ("models--" + repo.replace("/", "--"))


def _named(variable: str, default: str) -> str:
    """The folder that a variable of the environment names."""
    return os.path.expandvars(os.path.expanduser(os.environ.get(variable, default)))


def files_named(spec: ModelSpec) -> list[str]:
    """What `spec` names of files: model, adapter, draft model, chat template; nothing is read."""
    named = [spec.model, spec.engine.adapter_path, spec.engine.draft_model]
    named += [spec.engine.chat_template, *spec.engine.adapters.values()]
    return [name for name in named if name and "\n" not in name and len(name) <= 1024]


def model_roots(spec: ModelSpec) -> list[Path]:
    """Folders and files that `spec` names."""
    roots: list[Path] = []
    for name in files_named(spec):
        path = Path(name)
        roots.append(path if path.is_absolute() or path.exists() else hub_folder(name))
    return roots


def _entry(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return (str(path), -1, -1)
    return (str(path), facts.st_size, facts.st_mtime_ns)


def model_fingerprint(spec: ModelSpec) -> Fingerprint:
    """What the files of `spec` look like now; () where their disk does not say.

    A path that does not exist has its own look.
    """
    return look(f"files of {files_named(spec)}", lambda: _fingerprint(spec), ())


def _fingerprint(spec: ModelSpec) -> Fingerprint:
    entries: list[tuple[str, int, int]] = []
    for root in model_roots(spec):
        entries.append(_entry(root))
        for folder, folders, files in os.walk(root):
            folders.sort()
            entries += [_entry(Path(folder, name)) for name in sorted(files)]
            if len(entries) >= ENTRIES_MAX:
                return tuple(entries[:ENTRIES_MAX])
    return tuple(entries)
