"""Every mistake in a configuration file: its parts are tried one at a time; pure.

A start stops at the first mistake, which is enough to refuse it. Whoever checks a file wants to
hear of all of them at once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.settings.file import parse_file
from mlx_isolate_supervisor.settings.layers import Layers, Machine, resolve

# Parts that speak of models by their names.
_NAMING = ("groups", "hooks")


def find_mistakes(
    content: Mapping[str, Any], path: Path, environment: Mapping[str, str], machine: Machine
) -> list[str]:
    """One sentence for each mistake, in the order of the file; none where it can be served."""
    found: list[str] = []
    for part in _parts(content):
        try:
            layer = parse_file(part, path, environment)
            resolve(Layers(flags={}, environment=environment, file=layer), machine)
        except ConfigError as error:
            if str(error) not in found:
                found.append(str(error))
    return found


def _parts(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The file in pieces that can each be judged alone, then the whole."""
    macros = {"macros": content["macros"]} if "macros" in content else {}
    given: Any = content.get("models")
    models: dict[Any, Any] = given if isinstance(given, dict) else {}
    for key, value in content.items():
        if key == "models" and models:
            for model in _models(models):
                yield macros | {"models": model}
        elif key in _NAMING:
            for piece in _entries(value):
                yield macros | {"models": _told_apart(models), key: piece}
        else:
            yield macros | {key: value}
    yield dict(content)


def _models(models: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    yield from _entries(models)
    yield {id: _name(own) for id, own in models.items()}


def _told_apart(models: Mapping[Any, Any]) -> dict[Any, Any]:
    """The models by name and alias, without those aliases that are somebody's name already."""
    taken = {str(id) for id in models}
    found: dict[Any, Any] = {}
    for id, own in models.items():
        aliases = _name(own).get("aliases")
        names: list[Any] = aliases if isinstance(aliases, list) else []
        found[id] = {"aliases": [name for name in names if str(name) not in taken]}
        taken.update(map(str, names))
    return found


def _name(own: Any) -> dict[str, Any]:
    """What of a model others speak of it by."""
    found: dict[str, Any] = own if isinstance(own, dict) else {}
    return {key: found[key] for key in ("path", "aliases") if key in found}


def _entries(value: Any) -> Iterator[Any]:
    """A mapping of mappings, one inner entry at a time."""
    for piece in _each(value):
        if isinstance(piece, dict):
            pairs: dict[Any, Any] = piece
            for name, own in pairs.items():
                for inner in _each(own):
                    yield {name: inner}
        else:
            yield piece


def _each(value: Any) -> Iterator[Any]:
    """A mapping entry by entry; anything else as it is."""
    if not isinstance(value, dict) or not value:
        yield value
        return
    entries: dict[Any, Any] = value
    for key, item in entries.items():
        yield {key: item}
