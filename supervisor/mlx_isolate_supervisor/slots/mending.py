"""What has to be done to one model's record that a fault of our own code has left half changed: pure.

What holds between two messages of a slot is written down here once; whatever of it does not hold is
answered with the repair that makes it hold again.
"""

from enum import StrEnum

import msgspec

from mlx_isolate_supervisor.slots.lifecycle import State

# Where an engine process exists.
_LIVE = frozenset({State.STARTING, State.READY, State.DRAINING, State.STOPPING})
# Where a model is that is not wanted.
_DOWN = frozenset({State.STOPPED, State.DRAINING, State.STOPPING})


class Repair(StrEnum):
    """One thing to be done, in the order given."""

    DROP_ENGINE = "drop_engine"
    DROP_SUCCESSOR = "drop_successor"
    END_ENGINE = "end_engine"
    GO_DOWN = "go_down"
    GIVE_UP = "give_up"
    PROMOTE = "promote"
    NOTE_READY = "note_ready"
    NOTE_SUCCESSOR = "note_successor"
    WATCH = "watch"
    DRAIN = "drain"
    KILL = "kill"
    TRY = "try"
    ASK_ROOM = "ask_room"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a model.

    Attributes:
        is_wanted: it is to be up.
        has_engine: an engine is on record.
        is_engine_gone: and its process has been reaped.
        is_engine_ready: and it has called itself ready.
        is_engine_busy: and requests that will end hold places in it.
        has_successor: an engine that is to replace it is on record.
        is_successor_gone: and its process has been reaped.
        is_successor_ready: and it has called itself ready.
        timers: those that are set.
        is_deferred: a start waits for room.
        has_wish: and the residency knows.
        is_final: the model has failed and is not to be tried again.
        has_failure: the reason of a failure is on record.
    """

    state: State
    is_wanted: bool = True
    has_engine: bool = False
    is_engine_gone: bool = False
    is_engine_ready: bool = False
    is_engine_busy: bool = False
    has_successor: bool = False
    is_successor_gone: bool = False
    is_successor_ready: bool = False
    timers: frozenset[str] = frozenset()
    is_deferred: bool = False
    has_wish: bool = False
    is_final: bool = False
    has_failure: bool = False


def diagnose(now: Condition) -> tuple[Repair, ...]:
    """What to do; nothing where all is well."""
    repairs: list[Repair] = []
    if not now.is_wanted and now.state not in _DOWN:
        repairs.append(Repair.GO_DOWN)
    if now.has_engine and now.is_engine_gone:
        repairs.append(Repair.DROP_ENGINE)
    if now.has_successor and now.is_successor_gone:
        repairs.append(Repair.DROP_SUCCESSOR)
    has_engine = now.has_engine and not now.is_engine_gone
    has_successor = now.has_successor and not now.is_successor_gone
    if now.state in _LIVE:
        if not has_engine:
            repairs.append(Repair.PROMOTE if has_successor else Repair.GIVE_UP)
        else:
            repairs += _of_live(now)
        return tuple(repairs)
    if has_engine or has_successor:
        repairs.append(Repair.END_ENGINE)
    if now.is_deferred:
        if not now.has_wish:
            repairs.append(Repair.ASK_ROOM)
    elif now.state is State.FAILED and not now.has_failure:
        repairs.append(Repair.GIVE_UP)
    elif now.state is not State.STOPPED and not now.is_final and "try" not in now.timers:
        repairs.append(Repair.TRY)
    return tuple(repairs)


def _of_live(now: Condition) -> list[Repair]:
    """Of a model whose engine is there."""
    if now.state is State.STOPPING:
        return [] if "stop" in now.timers else [Repair.KILL]
    repairs: list[Repair] = []
    if "watch" not in now.timers:
        repairs.append(Repair.WATCH)
    if now.state is State.STARTING and now.is_engine_ready:
        repairs.append(Repair.NOTE_READY)
    if now.state is State.READY and now.is_successor_ready and not now.is_successor_gone:
        repairs.append(Repair.NOTE_SUCCESSOR)
    if now.state is State.DRAINING and ("drain" not in now.timers or not now.is_engine_busy):
        repairs.append(Repair.DRAIN)
    return repairs
