"""What a new configuration changes in a running daemon."""

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.reconfigure import describe_changes
from mlx_isolate_supervisor.settings.changes import (
    ModelChanges,
    compare_models,
    merge_live,
    restart_fields,
)

A = ModelSpec(id="a", model="/a")
B = ModelSpec(id="b", model="/b")


def test_equal_models_are_not_touched() -> None:
    assert compare_models([A, B], [A, B]) == ModelChanges()
    assert compare_models([A, B], [B, A]) == ModelChanges()


def test_models_come_and_go() -> None:
    changes = compare_models([A], [B])
    assert changes == ModelChanges(added=("b",), removed=("a",))


def test_only_what_an_engine_sees_needs_a_new_engine() -> None:
    replace = msgspec.structs.replace
    for changed in (
        replace(A, model="/other"),
        replace(A, env={"X": "1"}),
        replace(A, strip_params=("x",)),
        replace(A, engine=EngineSettings(temp=1.0)),
    ):
        assert compare_models([A], [changed]) == ModelChanges(replaced=("a",))
    for changed in (
        replace(A, aliases=("z",)),
        replace(A, ttl_s=5.0),
        replace(A, unlisted=True),
        replace(A, engine=EngineSettings(prompt_cache_bytes=5)),
    ):
        assert compare_models([A], [changed]) == ModelChanges(adjusted=("a",))


def test_some_settings_wait_for_the_next_start_and_are_named() -> None:
    old = ServeSettings(models=(A,))
    new = ServeSettings(models=(B,), port=9, queue_timeout_s=1.0, api_keys=("k",))
    assert restart_fields(old, new) == ("port", "queue_timeout_s")
    merged = merge_live(old, new)
    assert (merged.models, merged.api_keys, merged.port) == ((B,), ("k",), 8080)


def test_a_longer_patience_with_who_does_not_read_waits_too() -> None:
    patient = msgspec.structs.replace(A, engine=EngineSettings(stall_timeout_s=600.0))
    old, new = ServeSettings(models=(A,)), ServeSettings(models=(patient,))
    assert restart_fields(old, new) == ("stall_timeout_s",)
    assert restart_fields(new, old) == ()


def test_a_reload_is_told_in_one_line() -> None:
    changes = ModelChanges(added=("a",), replaced=("b", "c"))
    assert describe_changes(changes, ("port",)) == (
        "the configuration was reloaded: added a; replaced b, c; at the next start: port"
    )
    assert describe_changes(ModelChanges(), ()).endswith(": no model changed")
