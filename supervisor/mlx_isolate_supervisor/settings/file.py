"""The configuration file: from YAML to the layer it is among the settings.

Keys are llama-swap's where it has them, else the flags' names (`queue_timeout` or
`queue-timeout`); an unknown one is an error with the nearest known one.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.config import GroupSpec, ModelSpec
from mlx_isolate_supervisor.settings.file_facts import file_facts
from mlx_isolate_supervisor.settings.flags import FLAGS
from mlx_isolate_supervisor.settings.layers import FileLayer
from mlx_isolate_supervisor.settings.macros import ENVIRONMENT_REFERENCE, Macros
from mlx_isolate_supervisor.settings.models import check_unique, locate_model_of_file
from mlx_isolate_supervisor.settings.quantities import parse_time
from mlx_isolate_supervisor.settings.yaml_text import read_yaml

# llama-swap's names and ours that differ from a flag's.
TOP_NAMES = {
    "healthCheckTimeout": "--start-timeout",
    "globalTTL": "--ttl",
    "logLevel": "--log-level",
    "apiKeys": "--api-key",
    "memory_budget": "--memory-budget-gb",
}
TOP_PARTS = ("models", "groups", "hooks", "macros", "sendLoadingState")
MODEL_KEYS = (
    "path",
    "aliases",
    "ttl",
    "env",
    "concurrencyLimit",
    "unlisted",
    "filters",
    "sendLoadingState",
)
GROUP_KEYS = ("swap", "exclusive", "persistent", "members")
FILTER_KEYS = ("stripParams", "setParams")


def _key(flag_name: str) -> str:
    return flag_name.removeprefix("--").replace("-", "_")


# What makes no sense inside the file that it would name.
_NOT_IN_FILE = ("--config", "--watch-config", "--api-key-file")
DAEMON_FLAGS = {
    _key(flag.name): flag.name
    for flag in FLAGS
    if flag.scope == "daemon" and flag.name not in _NOT_IN_FILE
}
ENGINE_FLAGS = {_key(flag.name): flag.name for flag in FLAGS if flag.scope == "engine"}

Texts = str | list[str]


def read_file(path: Path, environment: Mapping[str, str]) -> FileLayer:
    """Read and parse a configuration file.

    Raises:
        ConfigError: it cannot be read, or as `parse_file`.
    """
    facts = file_facts(path)
    layer = parse_file(read_yaml(path), path, environment)
    return msgspec.structs.replace(layer, facts=facts)


def parse_file(content: Mapping[str, Any], path: Path, environment: Mapping[str, str]) -> FileLayer:
    """The layer that a configuration file is.

    Args:
        content: its YAML as a mapping.
        path: the file, for messages and for relative model paths.
        environment: for `${env.NAME}`.

    Raises:
        ConfigError: naming the file, the key and the remedy.
    """
    try:
        return _parse(content, path, environment)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse(content: Mapping[str, Any], path: Path, environment: Mapping[str, str]) -> FileLayer:
    given_models = mapping(content.get("models"), "models")
    _refuse_commands(given_models)
    macros = Macros(mapping(content.get("macros"), "macros"), environment)
    flags = DAEMON_FLAGS | TOP_NAMES | ENGINE_FLAGS
    _check_keys(content, (*TOP_PARTS, *flags), "")
    top = {key: value for key, value in content.items() if key not in TOP_PARTS}
    values = _texts(macros.expand(top, ""), flags, "")
    shown = _switch(content.get("sendLoadingState"), "sendLoadingState")
    specs: list[ModelSpec] = []
    engine: dict[str, dict[str, Texts]] = {}
    for id, given in given_models.items():
        place = f"models.{id}"
        if isinstance(given, str):
            raise ConfigError(f"{place} must be a mapping; write {{path: {given}}}.")
        own = macros.expand(mapping(given, place), place, id)
        _check_keys(own, (*MODEL_KEYS, *ENGINE_FLAGS), place)
        specs.append(_model(id, own, path.parent, shown))
        settings = {key: value for key, value in own.items() if key not in MODEL_KEYS}
        engine[id] = _texts(settings, ENGINE_FLAGS, place)
    check_unique([name for spec in specs for name in (spec.id, *spec.aliases)])
    groups = _groups(mapping(content.get("groups"), "groups"), specs)
    specs = _preload(_hooked(content.get("hooks")), _pin(groups, specs))
    return FileLayer(
        path=str(path),
        values=values,
        models=tuple(specs),
        engine=engine,
        groups=groups,
        holds_keys=_holds_keys(top, flags),
        variables=tuple(sorted(set(ENVIRONMENT_REFERENCE.findall(repr(content))))),
    )


def _holds_keys(top: Mapping[str, Any], flags: Mapping[str, str]) -> bool:
    """Whether keys stand in the file itself; what a macro stands for does, a variable does not."""
    for key, value in top.items():
        if flags.get(key.replace("-", "_")) == "--api-key" and value is not None:
            texts: list[Any] = value if isinstance(value, list) else [value]
            return any(not ENVIRONMENT_REFERENCE.fullmatch(str(text).strip()) for text in texts)
    return False


def _refuse_commands(models: Mapping[str, Any]) -> None:
    """Tell a file of llama-swap's from one of ours before its macros and keys are blamed."""
    for id, given in models.items():
        if isinstance(given, Mapping) and "cmd" in given:
            raise ConfigError(
                f"models.{id}.cmd: no commands are run here; 'mlx-isolate config import' turns a "
                "llama-swap file into one of ours."
            )


def _model(id: str, own: Mapping[str, Any], folder: Path, show_loading: bool) -> ModelSpec:
    place = f"models.{id}"
    filters = mapping(own.get("filters"), f"{place}.filters")
    _check_keys(filters, FILTER_KEYS, f"{place}.filters")
    limit = _number(own.get("concurrencyLimit"), f"{place}.concurrencyLimit")
    path = str(own.get("path") or id)
    if "\0" in path:
        raise ConfigError(f"{place}.path: {path!r} is no path that a system takes.")
    return ModelSpec(
        id=id,
        model=locate_model_of_file(path, folder),
        aliases=names(own.get("aliases"), f"{place}.aliases"),
        ttl_s=_ttl(own.get("ttl"), f"{place}.ttl"),
        env=_environment(own.get("env"), f"{place}.env"),
        concurrency_limit=limit or None,
        unlisted=_switch(own.get("unlisted"), f"{place}.unlisted"),
        strip_params=names(filters.get("stripParams"), f"{place}.filters.stripParams"),
        set_params=mapping(filters.get("setParams"), f"{place}.filters.setParams"),
        send_loading_state=show_loading
        if own.get("sendLoadingState") is None
        else _switch(own["sendLoadingState"], f"{place}.sendLoadingState"),
    )


def _groups(given: Mapping[str, Any], specs: Sequence[ModelSpec]) -> tuple[GroupSpec, ...]:
    known = {spec.id for spec in specs}
    groups: list[GroupSpec] = []
    taken: dict[str, str] = {}
    for id, value in given.items():
        place = f"groups.{id}"
        own = mapping(value, place)
        _check_keys(own, GROUP_KEYS, place)
        members = names(own.get("members"), f"{place}.members")
        for member in members:
            if member not in known:
                raise ConfigError(f"{place}.members: there is no model {member!r} under models.")
            if member in taken:
                raise ConfigError(f"{place}.members: {member!r} is in {taken[member]} already.")
            taken[member] = place
        switches = {
            key: _switch(own[key], f"{place}.{key}") for key in GROUP_KEYS[:3] if key in own
        }
        groups.append(msgspec.convert({"id": id, "members": members} | switches, GroupSpec))
    return tuple(groups)


def _pin(groups: Sequence[GroupSpec], specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    pinned = {member for group in groups if group.persistent for member in group.members}
    return [msgspec.structs.replace(spec, pinned=spec.id in pinned) for spec in specs]


def _hooked(hooks: Any) -> tuple[str, ...]:
    found = mapping(hooks, "hooks")
    _check_keys(found, ("on_startup",), "hooks")
    start = mapping(found.get("on_startup"), "hooks.on_startup")
    _check_keys(start, ("preload",), "hooks.on_startup")
    return names(start.get("preload"), "hooks.on_startup.preload")


def _preload(names: Sequence[str], specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    for name in names:
        if not any(name in (spec.id, *spec.aliases) for spec in specs):
            raise ConfigError(f"hooks.on_startup.preload: there is no model {name!r}.")
    return [
        msgspec.structs.replace(
            spec, preload=any(name in names for name in (spec.id, *spec.aliases))
        )
        for spec in specs
    ]


def _texts(given: Mapping[str, Any], flags: Mapping[str, str], place: str) -> dict[str, Texts]:
    """Values as the texts that a command line would have, by flag name; nulls left out."""
    texts: dict[str, Texts] = {}
    for key, value in given.items():
        if value is not None:
            name = flags.get(key) or flags[key.replace("-", "_")]
            texts[name] = _text(value)
    return texts


def _text(value: Any) -> Texts:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return json.dumps(value)
        case list():
            items: list[Any] = value
            return [str(_text(item)) for item in items]
        case _:
            return str(value)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in given:
        if key in known or key.replace("-", "_") in known:
            continue
        near = get_close_matches(key, known, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        where = f"{place}: " if place else ""
        raise ConfigError(f"{where}there is no key {key!r}{hint}")


def mapping(value: Any, place: str) -> dict[str, Any]:
    """What is under a key that holds further keys; nothing for null.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must be a mapping.")
    found: dict[Any, Any] = value
    return {str(key): item for key, item in found.items()}


def names(value: Any, place: str) -> tuple[str, ...]:
    """A list of names; llama-swap also writes some as one text with commas.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list):
        raise ConfigError(f"{place} must be a list.")
    items: list[Any] = value
    return tuple(str(item) for item in items)


def _environment(value: Any, place: str) -> dict[str, str]:
    """`NAME=value` texts as llama-swap writes them, or a mapping."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        pairs: dict[Any, Any] = value
        found = {str(key): str(_text(item)) for key, item in pairs.items()}
    else:
        for text in names(value, place) if not isinstance(value, str) else (value,):
            name, equals, content = text.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"{place}: {text!r} is not of the form NAME=value.")
            found[name.strip()] = content
    for name, content in found.items():
        # The value may be a secret.
        if not name or "=" in name or "\0" in name + content:
            raise ConfigError(f"{place}: {name!r} is no variable that a system takes.")
    return found


def _switch(value: Any, place: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"{place} must be true or false.")


def _number(value: Any, place: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{place} must be a whole number, zero or more.")
    return value


def _ttl(value: Any, place: str) -> float | None:
    """Seconds; None and llama-swap's -1 mean the daemon's own."""
    if value is None or value == -1:
        return None
    try:
        return parse_time(str(value))
    except ValueError as error:
        raise ConfigError(f"{place}: {value!r} {error}.") from None
