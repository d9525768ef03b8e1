"""What a setting's default is, and any value of it, in the words of a person."""

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.settings.flags import Flag
from mlx_isolate_supervisor.settings.quantities import show_bytes

# Defaults that are computed where the daemon runs.
_COMPUTED = {
    "run_dir": "by port, in the user's runtime folder",
    "log_dir": "the user's log folder",
    "cache_home": "the user's cache folder",
    "standby": "1 where 8 GB are free",
    "memory_budget_bytes": "75 % of the memory",
    "prompt_cache_bytes": "8 GB, at most a quarter of the memory budget",
    "ssd_spill_queue_bytes": "a quarter of the engine's prompt cache",
    "ttl_s": "never",
}
NO_DEFAULT = "none"


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
        return NO_DEFAULT
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
