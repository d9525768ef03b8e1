"""The pages about configuration, made from the table of flags: docs/configuration.md, the schema."""

import json
from typing import Any

from mlx_isolate_supervisor.settings.defaults import default_text
from mlx_isolate_supervisor.settings.file import (
    DAEMON_FLAGS,
    ENGINE_FLAGS,
    TOP_NAMES,
)
from mlx_isolate_supervisor.settings.flags import BY_NAME, FLAGS, Flag

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
[operations.md](operations.md#several-models); where the user's folders are, under \
[Start](operations.md#start).
"""

_ENGINE = """## Of each engine

Given as flags they hold for every model, but for those that belong to one (ONE_MODEL), which are \
refused beside several; in a file they may stand beside a model's path.
"""

_FILE = """## The file

YAML. A flag's name without its dashes is its key (`queue_timeout` or `queue-timeout`); llama-swap's \
keys are understood where it has them, and `mlx-isolate config import FILE` turns a llama-swap file \
that runs `mlx_lm.server` into one of ours. An unknown key is an error that names the nearest known one. \
`docs/config.schema.json`, which \
`mlx-isolate config schema` prints, describes it for editors.

```yaml
healthCheckTimeout: 120      # --start-timeout
globalTTL: 1800              # --ttl
logLevel: info
apiKeys: ["${env.MY_KEY}"]
sendLoadingState: true       # comments keep a streaming client company while it waits
memory_budget_gb: 48
macros:
  store: /models             # ${store} below
models:
  small:
    path: mlx-community/Qwen3-4B-4bit   # a folder, a repo or demo; default: its name
    aliases: [qwen]          # further names for it
    ttl: 600                 # seconds, or 10m; 0 = never, -1 = the daemon's
    env: ["HF_HUB_OFFLINE=1"]
    concurrencyLimit: 8      # requests in its engine at once; default: decode_concurrency
    unlisted: false          # true = served, but not in /v1/models
    filters:
      stripParams: "temperature, top_p"   # fields of requests that are dropped
      setParams: {top_k: 20}              # and those that are set, whatever the client sent
    max_tokens: 2048         # any setting of an engine
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
    one_model = ", ".join(f"`{flag.name}`" for flag in FLAGS if flag.one_model)
    engine = _ENGINE.replace("ONE_MODEL", one_model)
    parts = [_HEAD, "## Of the daemon\n", _table("daemon"), engine, _table("engine"), _FILE]
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
