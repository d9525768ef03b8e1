"""What a new configuration changes in a running daemon; pure."""

from collections.abc import Sequence

import msgspec

from mlx_isolate_supervisor.config import ModelSpec, ServeSettings

# Fields of a model that its engine never sees: a change of them needs no new engine.
_SUPERVISOR_FIELDS = frozenset(
    {"aliases", "preload", "pinned", "ttl_s", "concurrency_limit", "unlisted",
     "send_loading_state"}
)  # fmt: skip
# Settings of the daemon that take effect while it runs.
_LIVE_FIELDS = frozenset(
    {"models", "groups", "models_max", "memory_budget_bytes", "memory_policy", "ttl_s",
     "api_keys", "log_level"}
)  # fmt: skip
# Where the settings themselves came from.
_NOT_SETTINGS = frozenset({"config_path"})


class ModelChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Ids by what has to happen to them; models in neither tuple are not touched.

    Attributes:
        added: not served before.
        removed: served no longer.
        replaced: need a new engine.
        adjusted: changed in what only the supervisor looks at.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()


def compare_models(old: Sequence[ModelSpec], new: Sequence[ModelSpec]) -> ModelChanges:
    """What has to happen so that `new` is served instead of `old`."""
    before = {model.id: model for model in old}
    after = {model.id: model for model in new}
    replaced: list[str] = []
    adjusted: list[str] = []
    for id, model in after.items():
        if id in before and before[id] != model:
            needs_engine = _engine_part(before[id]) != _engine_part(model)
            (replaced if needs_engine else adjusted).append(id)
    return ModelChanges(
        added=tuple(id for id in after if id not in before),
        removed=tuple(id for id in before if id not in after),
        replaced=tuple(replaced),
        adjusted=tuple(adjusted),
    )


def _engine_part(model: ModelSpec) -> dict[str, object]:
    # A share of the prompt cache depends on the other models; it holds from the next engine on.
    engine = msgspec.structs.replace(model.engine, prompt_cache_bytes=None)
    fields = msgspec.structs.asdict(msgspec.structs.replace(model, engine=engine))
    return {name: value for name, value in fields.items() if name not in _SUPERVISOR_FIELDS}


def restart_fields(old: ServeSettings, new: ServeSettings) -> tuple[str, ...]:
    """Fields that differ and take effect at the next start only."""
    later = set(ServeSettings.__struct_fields__) - _LIVE_FIELDS - _NOT_SETTINGS
    names = [
        name
        for name in ServeSettings.__struct_fields__
        if name in later and getattr(old, name) != getattr(new, name)
    ]
    if new.stall_timeout_s > old.stall_timeout_s:
        # Engines take it at once; the relay hangs up on who does not read as it did before.
        names.append("stall_timeout_s")
    return tuple(names)


def merge_live(old: ServeSettings, new: ServeSettings) -> ServeSettings:
    """`old` with the fields of `new` that take effect while the daemon runs."""
    live = {name: getattr(new, name) for name in _LIVE_FIELDS}
    return msgspec.structs.replace(old, **live)
