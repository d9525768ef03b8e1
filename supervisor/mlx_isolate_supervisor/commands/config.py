"""`mlx-isolate config check|show|import|schema`: look at a configuration without running it."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands import serve
from mlx_isolate_supervisor.commands.json_output import print_json
from mlx_isolate_supervisor.commands.tables import table
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.settings.flags import FLAGS, Flag
from mlx_isolate_supervisor.settings.layers import Resolved, origin_key

HIDDEN = "(hidden)"
# Fields of a model to their names in the file, where they have one.
_MODEL_FACTS = {
    "model": "path",
    "aliases": "aliases",
    "preload": "preload",
    "pinned": "persistent",
    "ttl_s": "ttl",
    "concurrency_limit": "concurrencyLimit",
    "unlisted": "unlisted",
    "strip_params": "stripParams",
    "set_params": "setParams",
    "send_loading_state": "sendLoadingState",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(verb: str, help: str) -> argparse.ArgumentParser:
        return verbs.add_parser(verb, help=help, description=help)

    check = add("check", "say whether a file can be served, or what is wrong")
    check.add_argument("file", metavar="FILE", help="a configuration file (YAML)")
    show = add("show", "print every value that serve would run with, and why")
    show.add_argument("--json", action="store_true", help="as JSON")
    serve.add_arguments(show)
    importing = add(
        "import",
        "turn a llama-swap file with mlx_lm.server commands into one of ours, and print that",
    )
    importing.add_argument("file", metavar="FILE", help="a llama-swap file")
    add("schema", "print the JSON schema of the file")


def run(args: argparse.Namespace) -> int:
    """Do what the verb says."""
    match args.verb:
        case "check":
            return _check(args.file)
        case "show":
            return _show(serve.settings_of(args), as_json=args.json)
        case "import":
            return _import(Path(args.file))
        case _:
            from mlx_isolate_supervisor.settings.page import schema_text

            print(schema_text(), end="")
            return exit_codes.OK


def _check(file: str) -> int:
    from mlx_isolate_supervisor.settings.file import read_file

    mistakes = _mistakes(Path(file).expanduser())
    for sentence in mistakes:
        print(f"mlx-isolate: {harmless(sentence)}", file=sys.stderr)
    if mistakes:
        return exit_codes.USAGE
    args = argparse.Namespace(models=[], more_models=[], served_names=[], **{"--config": file})
    resolved = serve.settings_of(args)
    missing = serve.missing_folders(resolved.settings.models)
    for model in missing:
        print(f"{file}: models.{model.id}: there is no folder {model.model}", file=sys.stderr)
    names = ", ".join(model.id for model in resolved.settings.models)
    if not read_file(Path(file).expanduser(), os.environ).models:
        names += " (the file names none)"
    without = f", but for {', '.join(model.id for model in missing)}" if missing else ""
    print(f"{file} can be served{without}; models: {names}")
    return exit_codes.OK


def _mistakes(path: Path) -> list[str]:
    from mlx_isolate_supervisor.settings.mistakes import find_mistakes
    from mlx_isolate_supervisor.settings.yaml_text import read_yaml

    return find_mistakes(read_yaml(path), path, os.environ, serve.this_machine())


def _show(resolved: Resolved, *, as_json: bool) -> int:
    for sentence in resolved.warnings:
        print(f"mlx-isolate: {harmless(sentence)}", file=sys.stderr)
    if as_json:
        print_json(shown_settings(resolved))
        return exit_codes.OK
    for line in show_lines(resolved):
        print(line)
    return exit_codes.OK


def show_lines(resolved: Resolved) -> list[str]:
    """All settings, then each model with what it has of its own, secrets hidden."""
    lines = table(("SETTING", "VALUE", "FROM"), _rows(resolved))
    for model in resolved.settings.models:
        own = _model_facts(model) | _own_settings(model, resolved.engine)
        lines += ["", f"model {model.id}"]
        lines += [f"  {name} {value}" for name, value in own.items()]
    return lines


def _rows(resolved: Resolved) -> list[tuple[str, str, str]]:
    from mlx_isolate_supervisor.settings.defaults import default_text, show_value

    rows: list[tuple[str, str, str]] = []
    for flag in FLAGS:
        origin = resolved.origins.get(origin_key(flag))
        if origin is None:
            rows.append((flag.name, default_text(flag), "default"))
        elif flag.secret or flag.field == "api_key_file":
            rows.append((flag.name, HIDDEN, origin))
        else:
            rows.append((flag.name, show_value(flag, _value(resolved, flag)), origin))
    return rows


def _value(resolved: Resolved, flag: Flag) -> object:
    if flag.scope == "daemon":
        return getattr(resolved.settings, flag.field)
    return getattr(resolved.engine, flag.field)


def _model_facts(model: ModelSpec) -> dict[str, str]:
    facts: dict[str, str] = {}
    for field, name in _MODEL_FACTS.items():
        value = getattr(model, field)
        if value is True:
            facts[name] = "on"
        elif isinstance(value, tuple) and value:
            facts[name] = ", ".join(value)
        elif value not in (None, (), {}, False) or (field == "ttl_s" and value is not None):
            facts[name] = f"{value:g}s" if field == "ttl_s" else str(value)
    if model.env:
        # Tokens travel in environments: only the names are shown.
        facts["env"] = ", ".join(f"{name}={HIDDEN}" for name in model.env)
    return facts


def _own_settings(model: ModelSpec, engine: EngineSettings) -> dict[str, str]:
    """Engine settings in which a model differs from those that hold for all."""
    from mlx_isolate_supervisor.settings.defaults import show_value

    return {
        flag.name: show_value(flag, getattr(model.engine, flag.field))
        for flag in FLAGS
        if flag.scope == "engine"
        and getattr(model.engine, flag.field) != getattr(engine, flag.field)
    }


def shown_settings(resolved: Resolved) -> dict[str, Any]:
    """All values with their origins for a script, secrets hidden."""
    values = msgspec.to_builtins(resolved.settings)
    values["api_keys"] = [HIDDEN for _ in values["api_keys"]]
    for model in values["models"]:
        model["env"] = dict.fromkeys(model["env"], HIDDEN)
    return {"settings": values, "origins": dict(resolved.origins)}


def _import(path: Path) -> int:
    from mlx_isolate_supervisor.settings.llama_swap import import_llama_swap

    imported = import_llama_swap(path, os.environ)
    print(imported.text, end="")
    for remark in imported.remarks:
        print(f"mlx-isolate: {path}: {remark}", file=sys.stderr)
    return exit_codes.OK
