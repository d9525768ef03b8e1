"""Import of llama-swap's configuration: its mlx_lm.server commands become models of ours."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.settings.file import (
    ENGINE_FLAGS,
    FILTER_KEYS,
    GROUP_KEYS,
    MODEL_KEYS,
    TOP_NAMES,
    mapping,
    names,
    parse_file,
)
from mlx_isolate_supervisor.settings.flags import BY_NAME
from mlx_isolate_supervisor.settings.macros import ENVIRONMENT_REFERENCE, Macros
from mlx_isolate_supervisor.settings.yaml_text import read_yaml

# Where one engine listens is the supervisor's business now; nothing is lost by leaving them out.
_OBSOLETE_FLAGS = ("--host", "--port", "--log-level", "--allowed-origins")
_OBSOLETE_KEYS = (
    "cmd",
    "cmdStop",
    "macros",
    "proxy",
    "checkEndpoint",
    "useModelName",
    "name",
    "description",
)
# stripParams in an older spelling that llama-swap still reads.
_OLD_STRIP_KEY = "strip_params"
# llama-swap fills these in itself.
_GIVEN = {"PORT": "0", "PID": "0"}


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of ours, as YAML, and what could not be carried over."""

    text: str
    remarks: tuple[str, ...]


def import_llama_swap(path: Path, environment: Mapping[str, str]) -> Imported:
    """Translate a file.

    Raises:
        ConfigError: it cannot be read, no model of it can be served here, or what came out of it
            is not right.
    """
    source = read_yaml(path)
    remarks: list[str] = []
    # What a variable holds may be a secret, so each stands for itself in what is printed.
    unread = {name: f"${{env.{name}}}" for name in ENVIRONMENT_REFERENCE.findall(repr(source))}
    shared = _GIVEN | mapping(source.get("macros"), "macros")
    everywhere = Macros(shared, unread)
    ours: dict[str, Any] = {}
    for key, value in source.items():
        if key in TOP_NAMES or key in ("hooks", "sendLoadingState"):
            ours[key] = everywhere.expand(value, key)
        elif key not in ("models", "groups", "macros"):
            remarks.append(_left_out(key))
    models: dict[str, Any] = {}
    for id, given in mapping(source.get("models"), "models").items():
        place = f"models.{id}"
        own = mapping(given, place)
        added = mapping(own.get("macros"), f"{place}.macros")
        macros = Macros(shared | added, unread) if added else everywhere
        model = _model(id, own, macros, remarks)
        if model is not None:
            models[id] = model
    if not models:
        raise ConfigError(f"{path}: no model of it runs mlx_lm.server, so none can be imported.")
    ours["models"] = models
    _groups(source.get("groups"), ours, remarks)
    _preloads(ours, remarks)
    parse_file(ours, path, unread | dict(environment))
    text: str = yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)
    return Imported(text=text, remarks=tuple(remarks))


def _groups(given: Any, ours: dict[str, Any], remarks: list[str]) -> None:
    groups: dict[str, Any] = {}
    for id, group in mapping(given, "groups").items():
        place = f"groups.{id}"
        kept = {key: value for key, value in mapping(group, place).items() if key in GROUP_KEYS}
        members = names(kept.get("members"), f"{place}.members")
        kept["members"] = [name for name in members if name in ours["models"]]
        if kept["members"]:
            groups[id] = kept
        else:
            remarks.append(f"groups.{id} has no member left and was left out")
    if groups:
        ours["groups"] = groups


def _preloads(ours: dict[str, Any], remarks: list[str]) -> None:
    """Drop what was left out from the models to preload."""
    hooks = mapping(ours.get("hooks"), "hooks")
    start = mapping(hooks.get("on_startup"), "hooks.on_startup")
    wanted = list(names(start.get("preload"), "hooks.on_startup.preload"))
    known = {
        name
        for id, model in ours["models"].items()
        for name in (id, *names(model.get("aliases"), f"models.{id}.aliases"))
    }
    kept = [name for name in wanted if name in known]
    if kept != wanted:
        remarks.append("hooks.on_startup.preload lost the models that were left out")
        ours["hooks"] = {"on_startup": {"preload": kept}}


def _model(
    id: str, given: dict[str, Any], macros: Macros, remarks: list[str]
) -> dict[str, Any] | None:
    place = f"models.{id}"
    command = macros.expand(str(given.get("cmd") or ""), f"{place}.cmd", id)
    try:
        arguments = _server_arguments(shlex.split(command, comments=True))
    except ValueError as error:
        raise ConfigError(f"{place}.cmd is no command: {error}.") from error
    if arguments is None:
        remarks.append(f"{place} does not run mlx_lm.server and was left out")
        return None
    model: dict[str, Any] = {}
    _read_arguments(arguments, model, place, remarks)
    for key, value in given.items():
        if key in MODEL_KEYS:
            model[key] = macros.expand(value, f"{place}.{key}", id)
        elif key not in _OBSOLETE_KEYS:
            remarks.append(_left_out(f"{place}.{key}"))
    if "aliases" in model:
        model["aliases"] = _aliases(model["aliases"], f"{place}.aliases", remarks)
    if "filters" in model:
        model["filters"] = _filters(model["filters"], f"{place}.filters", remarks)
    return model


def _aliases(given: Any, place: str, remarks: list[str]) -> Any:
    """The names alone: llama-swap may say more of an alias."""
    if not isinstance(given, list):
        return given
    items: list[Any] = given
    aliases: list[Any] = []
    for item in items:
        if not isinstance(item, dict):
            aliases.append(item)
            continue
        facts = mapping(item, place)
        aliases.append(facts.pop("id", None))
        remarks += [_left_out(f"{place}: {key} of {aliases[-1]}") for key in facts]
    return aliases


def _filters(given: Any, place: str, remarks: list[str]) -> dict[str, Any]:
    found = mapping(given, place)
    if (old := found.pop(_OLD_STRIP_KEY, None)) is not None:
        found.setdefault("stripParams", old)
    remarks += [_left_out(f"{place}.{key}") for key in found if key not in FILTER_KEYS]
    return {key: value for key, value in found.items() if key in FILTER_KEYS}


def _server_arguments(words: list[str]) -> list[str] | None:
    """What follows `mlx_lm.server` or `mlx_lm server`; None if the command is another."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "mlx_lm.server":
            return words[index + 1 :]
        if name == "mlx_lm" and words[index + 1 : index + 2] == ["server"]:
            return words[index + 2 :]
    return None


def _scalar(text: str) -> str | int | float:
    """A number where that is all the text says, so that it stands in the file without quotes."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text:
            return number
    return text


def _read_arguments(
    arguments: list[str], model: dict[str, Any], place: str, remarks: list[str]
) -> None:
    keys = {name: key for key, name in ENGINE_FLAGS.items()}
    position = 0
    while position < len(arguments):
        name, equals, value = arguments[position].partition("=")
        position += 1
        flag = BY_NAME.get(name)
        takes_value = name == "--model" or (flag is not None and not flag.is_switch)
        if takes_value and not equals and position < len(arguments):
            value = arguments[position]
            position += 1
        if name == "--model":
            model["path"] = value
        elif name in keys:
            model[keys[name]] = True if BY_NAME[name].is_switch else _scalar(value)
        elif name == "--prompt-cache-bytes":
            remarks.append(f"{place}: {name} is one figure for all models now; set it at the top")
        elif name not in _OBSOLETE_FLAGS:
            remarks.append(_left_out(f"{place}: the flag {name}"))


def _left_out(what: str) -> str:
    return f"{what} has no counterpart and was left out"
