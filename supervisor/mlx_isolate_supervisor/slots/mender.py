"""Makes one model's record agree with itself again, at the engine's cost if it must be.

What is to be done is decided by `mending`, after a message of the slot has failed half done.
"""

import logging
from collections.abc import Callable
from typing import assert_never

from mlx_isolate_supervisor.slots.lifecycle import Action, Event, State
from mlx_isolate_supervisor.slots.machine import Machine
from mlx_isolate_supervisor.slots.mending import Condition, Repair, diagnose
from mlx_isolate_supervisor.telemetry.logs import log_event


def mend(machine: Machine, *, has_wish: bool, note_ready: Callable[[], None]) -> None:
    """Do all the repairs that are needed.

    Args:
        has_wish: whether the residency knows of a deferred start.
        note_ready: to be told where it turns out that an engine had become ready.
    """
    machine.crew.retirees.mend()
    # One after the other, since each may change what the next one would be.
    done: set[Repair] = set()
    while left := [r for r in diagnose(condition_of(machine, has_wish)) if r not in done]:
        done.add(left[0])
        log_event("model.mended", logging.WARNING, model=machine.spec.id, repair=left[0].value)
        _do(left[0], machine, note_ready)


def condition_of(machine: Machine, has_wish: bool) -> Condition:
    """What there is of the model."""
    engine, successor = machine.crew.engine, machine.crew.successor
    return Condition(
        state=machine.state,
        is_wanted=machine.wanted,
        has_engine=engine is not None,
        is_engine_gone=engine is not None and engine.process.has_exited,
        is_engine_ready=engine is not None and engine.facts is not None,
        is_engine_busy=engine is not None and engine.requests > 0,
        has_successor=successor is not None,
        is_successor_gone=successor is not None and successor.process.has_exited,
        is_successor_ready=successor is not None and successor.facts is not None,
        timers=machine.timers.names,
        is_deferred=machine.deferred is not None,
        has_wish=has_wish,
        is_final=machine.past.is_final,
        has_failure=machine.past.failure is not None,
    )


def _do(repair: Repair, machine: Machine, note_ready: Callable[[], None]) -> None:
    match repair:
        case Repair.DROP_ENGINE:
            machine.crew.engine = None
        case Repair.DROP_SUCCESSOR:
            machine.crew.successor = None
        case Repair.END_ENGINE:
            machine.crew.end_all()
        case Repair.GO_DOWN:
            machine.apply(Event.WANT_DOWN)
        case Repair.GIVE_UP:
            _give_up(machine)
        case Repair.PROMOTE:
            machine.act(Action.PROMOTE)
            machine.apply(Event.SUCCEEDED)
        case Repair.NOTE_READY:
            machine.apply(Event.READY)
            note_ready()
        case Repair.NOTE_SUCCESSOR:
            machine.apply(Event.SUCCESSOR_READY)
            note_ready()
        case Repair.WATCH:
            machine.events.begin_watch()
        case Repair.DRAIN:
            machine.act(Action.DRAIN)
        case Repair.KILL:
            machine.act(Action.KILL)
        case Repair.TRY:
            machine.act(Action.SCHEDULE_TRY)
        case Repair.ASK_ROOM:
            machine.take_room()
        case _:
            assert_never(repair)


def _give_up(machine: Machine) -> None:
    """There is no engine where there should be one: refuse who waits, and try again soon."""
    machine.past.note_own_fault()
    if machine.state is State.FAILED:
        machine.act(Action.SCHEDULE_TRY)
    else:
        event = Event.CIRCUIT_OPENED if machine.wanted else Event.EXITED
        machine.apply(event, "our own fault")
