"""The pages about configuration, made from the table of flags: docs/configuration.md, the schema."""

import json
from typing import Any

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.settings.file import (
    DAEMON_FLAGS,
    ENGINE_FLAGS,
    TOP_NAMES,
)
from mlx_isolate_supervisor.settings.flags import BY_NAME, FLAGS, Flag
from mlx_isolate_supervisor.settings.quantities import show_bytes

# Defaults that are computed where the daemon runs.
_COMPUTED = {
    "run_dir": "the user's, by port",
    "log_dir": "the user's",
    "cache_home": "the user's",
    "standby": "1 where 8 GB are free",
    "memory_budget_bytes": "75 % of the memory",
    "prompt_cache_bytes": "8 GB, at most a quarter of the memory budget",
    "ssd_spill_queue_bytes": "a quarter of the engine's prompt cache",
    "ttl_s": "never",
}
_NO_DEFAULT = "none"

_HEAD = """# Configuration

Generated from the code by `python -m tests.architecture.generated`.

A value is taken from the command line, else from the environment, else from the configuration \
file (`--config FILE`), else it is the default. `mlx-isolate config show` prints every value with \
the place it came from; `mlx-isolate config check FILE` says what is wrong with a file.

Sizes are written `32GB`, `512MiB` or `20%` (of the memory; for `--ssd-cache-max-gb` of the disk), \
times `90`, `90s` or `5m`. Switches are turned off by `--no-…`. In the environment a switch is \
`true` or `false`, and several values are separated by commas. `HF_HOME`, `HF_TOKEN` and \
`HF_HUB_OFFLINE` are honoured.

What `--models-max`, `--memory-budget-gb`, `--ttl` and `groups` do is told in \
[operations.md](operations.md#several-models).
"""

_ENGINE = """## Of each engine

Given as flags they hold for every model; in a file they may stand beside a model's path.
"""

_FILE = """## The file

YAML. A flag's name without its dashes is its key (`queue_timeout` or `queue-timeout`); llama-swap's \
keys are understood where it has one. An unknown key is an error that names the nearest known one. \
`docs/config.schema.json` describes it for editors.

```yaml
healthCheckTimeout: 120      # --start-timeout
globalTTL: 1800              # --ttl
logLevel: info
apiKeys: ["${env.MY_KEY}"]
sendLoadingState: true       # comments keep a streaming client company while it waits
memory_budget: 48GB
macros:
  store: /models
models:
  small:
    path: mlx-community/Qwen3-4B-4bit
    aliases: [qwen]
    ttl: 600                 # seconds; 0 = never, -1 = the daemon's
    env: ["HF_HUB_OFFLINE=1"]
    concurrencyLimit: 8      # default: decode_concurrency
    unlisted: false
    filters:
      stripParams: "temperature"
      setParams: {top_k: 20}
    max_tokens: 2048         # any engine setting below
  big:
    path: "${store}/${MODEL_ID}"
groups:
  resident: {swap: false, exclusive: false, persistent: true, members: [small]}
hooks:
  on_startup: {preload: [small]}
```

Models of the command line load at start; those of a file load on first use unless they are \
preloaded. A path that does not exist refuses a start from the command line; in a file that model \
is failed, and works once the path has been repaired.
"""


def document() -> str:
    """The text of docs/configuration.md."""
    parts = [_HEAD, "## Of the daemon\n", _table("daemon"), _ENGINE, _table("engine"), _FILE]
    return "\n".join(parts)


def schema_text() -> str:
    """The text of docs/config.schema.json."""
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def schema() -> dict[str, Any]:
    """JSON schema (2020-12) of the configuration file."""
    names = {"type": "array", "items": {"type": "string"}}
    switch = {"type": "boolean"}
    engine = {key: _value_schema(BY_NAME[name]) for key, name in ENGINE_FLAGS.items()}
    daemon = {key: _value_schema(BY_NAME[name]) for key, name in (DAEMON_FLAGS | TOP_NAMES).items()}
    model = {
        "path": {"type": "string"},
        "aliases": names,
        "ttl": {"type": ["number", "string", "null"]},
        "env": {"anyOf": [names, {"type": "object"}]},
        "concurrencyLimit": {"type": "integer", "minimum": 0},
        "unlisted": switch,
        "filters": _object(
            {"stripParams": {"anyOf": [{"type": "string"}, names]}, "setParams": {"type": "object"}}
        ),
        "sendLoadingState": switch,
    }
    group = {"swap": switch, "exclusive": switch, "persistent": switch, "members": names}
    parts = {
        "models": {"type": "object", "additionalProperties": _object(model | engine)},
        "groups": {"type": "object", "additionalProperties": _object(group)},
        "hooks": _object({"on_startup": _object({"preload": names})}),
        "macros": {"type": "object"},
        "sendLoadingState": switch,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mlx-isolate configuration",
        **_object(daemon | engine | parts),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _value_schema(flag: Flag) -> dict[str, Any]:
    if flag.is_switch:
        return {"type": "boolean", "description": flag.help}
    if flag.several:
        one = {"type": "string"}
        return {"anyOf": [one, {"type": "array", "items": one}], "description": flag.help}
    if flag.metavar == "JSON":
        return {"type": "object", "description": flag.help}
    return {"type": ["string", "number", "null"], "description": flag.help}


def _table(scope: str) -> str:
    lines = ["| flag | environment | default | what |", "| --- | --- | --- | --- |"]
    for flag in FLAGS:
        if flag.scope == scope:
            shown = f"`{flag.name}`" if flag.is_switch else f"`{flag.name} {flag.metavar}`"
            shown = shown.replace("|", "\\|")
            default = default_text(flag)
            lines.append(f"| {shown} | `{flag.variable}` | {default} | {flag.help} |")
    return "\n".join(lines) + "\n"


def default_text(flag: Flag) -> str:
    """A flag's default as a person would write it."""
    if flag.field in _COMPUTED:
        return _COMPUTED[flag.field]
    owner: type[msgspec.Struct] = ServeSettings if flag.scope == "daemon" else EngineSettings
    fields = {field.name: field.default for field in msgspec.structs.fields(owner)}
    return show_value(flag, fields.get(flag.field))


def show_value(flag: Flag, value: object) -> str:
    """A setting's value as a person would write it."""
    if value is msgspec.NODEFAULT or value is None or value in ((), "", {}):
        return _NO_DEFAULT
    if flag.field.endswith("_s") and isinstance(value, int | float):
        return f"{value:g}s"
    if "bytes" in flag.field and isinstance(value, int):
        return _show_size(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        items: tuple[object, ...] = value
        return ", ".join(str(item) for item in items)
    return str(value)


def _show_size(count: int) -> str:
    if count and count % (1 << 20) == 0:
        return f"{count >> 20} MiB"
    if count % 1024 == 0 and count < 1 << 20:
        return f"{count >> 10} KiB"
    return show_bytes(count)
