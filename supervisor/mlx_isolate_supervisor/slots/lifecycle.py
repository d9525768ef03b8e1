"""The lifecycle of one model as a table: state and event to next state and actions.

Pure data with a pure step; `docs/lifecycle.md` shows it, with a sentence for each name. What an
action does is the slot's business, and so is the order around an exit: a process is reaped, its
socket unlinked and its end judged (`restart.judge`) before one of the exit events is chosen.
"""

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """What a slot's engine is observed to be."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to a slot."""

    WANT_UP = "want_up"
    WANT_DOWN = "want_down"
    READY = "ready"
    START_FAILED = "start_failed"
    START_TIMEOUT = "start_timeout"
    HUNG = "hung"
    DRAINED = "drained"
    STOP_TIMEOUT = "stop_timeout"
    EXITED = "exited"
    LOST = "lost"
    CIRCUIT_OPENED = "circuit_opened"
    CANNOT_WORK = "cannot_work"
    BACKOFF_ELAPSED = "backoff_elapsed"
    RESET = "reset"
    SPEC_CHANGED = "spec_changed"
    REPLACE = "replace"
    SUCCESSOR_READY = "successor_ready"
    SUCCESSOR_LOST = "successor_lost"
    SUCCEEDED = "succeeded"


# What befalls a model without anybody's asking for it.
UNASKED = frozenset(
    {
        Event.START_FAILED,
        Event.START_TIMEOUT,
        Event.HUNG,
        Event.STOP_TIMEOUT,
        Event.LOST,
        Event.CIRCUIT_OPENED,
        Event.CANNOT_WORK,
        Event.SUCCESSOR_LOST,
    }
)


class Action(StrEnum):
    """What a slot does on a transition, in the order given."""

    SPAWN = "spawn"
    DRAIN = "drain"
    TERMINATE = "terminate"
    ABORT = "abort"
    KILL = "kill"
    LIMIT_STOP = "limit_stop"
    SCHEDULE_TRY = "schedule_try"
    CANCEL_TRY = "cancel_try"
    FORGET_CRASHES = "forget_crashes"
    REFUSE_WAITERS = "refuse_waiters"
    SPAWN_SUCCESSOR = "spawn_successor"
    END_SUCCESSOR = "end_successor"
    SWITCH = "switch"
    PROMOTE = "promote"


class Transition(NamedTuple):
    """The next state, and what to do on the way there."""

    state: State
    actions: tuple[Action, ...] = ()


IGNORE = None
Cell = Transition | None

_A = Action
_TRY_NOW = Transition(State.STARTING, (_A.CANCEL_TRY, _A.FORGET_CRASHES, _A.SPAWN))
_BACK_OFF = Transition(State.BACKOFF, (_A.SCHEDULE_TRY,))
_OPEN_CIRCUIT = Transition(State.FAILED, (_A.REFUSE_WAITERS, _A.SCHEDULE_TRY))
_GIVE_UP = Transition(State.FAILED, (_A.REFUSE_WAITERS,))
_SUCCEED = Transition(State.STARTING, (_A.PROMOTE,))

TRANSITIONS: dict[State, dict[Event, Cell]] = {
    State.STOPPED: {
        Event.WANT_UP: Transition(State.STARTING, (_A.SPAWN,)),
        Event.WANT_DOWN: IGNORE,
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        Event.HUNG: IGNORE,
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: IGNORE,
        Event.LOST: IGNORE,
        Event.CIRCUIT_OPENED: IGNORE,
        Event.CANNOT_WORK: IGNORE,
        Event.BACKOFF_ELAPSED: IGNORE,
        Event.RESET: Transition(State.STOPPED, (_A.FORGET_CRASHES,)),
        Event.SPEC_CHANGED: Transition(State.STOPPED, (_A.FORGET_CRASHES,)),
        Event.REPLACE: Transition(State.STOPPED, (_A.FORGET_CRASHES,)),
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: IGNORE,
    },
    State.STARTING: {
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.STOPPING, (_A.TERMINATE,)),
        Event.READY: Transition(State.READY),
        Event.START_FAILED: Transition(State.STOPPING, (_A.ABORT,)),
        Event.START_TIMEOUT: Transition(State.STOPPING, (_A.ABORT,)),
        Event.HUNG: IGNORE,
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: Transition(State.STOPPED),
        Event.LOST: _BACK_OFF,
        Event.CIRCUIT_OPENED: _OPEN_CIRCUIT,
        Event.CANNOT_WORK: _GIVE_UP,
        Event.BACKOFF_ELAPSED: IGNORE,
        Event.RESET: Transition(State.STARTING, (_A.FORGET_CRASHES,)),
        Event.SPEC_CHANGED: Transition(State.STOPPING, (_A.FORGET_CRASHES, _A.TERMINATE)),
        Event.REPLACE: Transition(State.STOPPING, (_A.FORGET_CRASHES, _A.TERMINATE)),
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: IGNORE,
    },
    State.READY: {
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.DRAINING, (_A.END_SUCCESSOR, _A.DRAIN)),
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        # A successor that loads already goes on; it takes over when the hung engine is gone.
        Event.HUNG: Transition(State.STOPPING, (_A.ABORT,)),
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: Transition(State.STOPPED),
        Event.LOST: _BACK_OFF,
        Event.CIRCUIT_OPENED: _OPEN_CIRCUIT,
        Event.CANNOT_WORK: _GIVE_UP,
        Event.BACKOFF_ELAPSED: IGNORE,
        Event.RESET: Transition(State.READY, (_A.FORGET_CRASHES,)),
        Event.SPEC_CHANGED: Transition(
            State.DRAINING, (_A.FORGET_CRASHES, _A.END_SUCCESSOR, _A.DRAIN)
        ),
        Event.REPLACE: Transition(State.READY, (_A.FORGET_CRASHES, _A.SPAWN_SUCCESSOR)),
        Event.SUCCESSOR_READY: Transition(State.READY, (_A.SWITCH,)),
        Event.SUCCESSOR_LOST: Transition(State.READY),
        Event.SUCCEEDED: _SUCCEED,
    },
    State.DRAINING: {
        # An unload is carried through: otherwise a steady client could keep a model loaded that
        # has to make room. Who asks meanwhile waits, and the exit is judged `lost`.
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.DRAINING, (_A.DRAIN,)),
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        Event.HUNG: Transition(State.STOPPING, (_A.ABORT,)),
        Event.DRAINED: Transition(State.STOPPING, (_A.TERMINATE,)),
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: Transition(State.STOPPED),
        Event.LOST: _BACK_OFF,
        Event.CIRCUIT_OPENED: _OPEN_CIRCUIT,
        Event.CANNOT_WORK: _GIVE_UP,
        Event.BACKOFF_ELAPSED: IGNORE,
        Event.RESET: Transition(State.DRAINING, (_A.FORGET_CRASHES,)),
        Event.SPEC_CHANGED: Transition(State.DRAINING, (_A.FORGET_CRASHES,)),
        Event.REPLACE: Transition(State.DRAINING, (_A.FORGET_CRASHES,)),
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: IGNORE,
    },
    State.STOPPING: {
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.STOPPING, (_A.END_SUCCESSOR, _A.LIMIT_STOP)),
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        Event.HUNG: IGNORE,
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: Transition(State.STOPPING, (_A.KILL,)),
        Event.EXITED: Transition(State.STOPPED),
        Event.LOST: _BACK_OFF,
        Event.CIRCUIT_OPENED: _OPEN_CIRCUIT,
        Event.CANNOT_WORK: _GIVE_UP,
        Event.BACKOFF_ELAPSED: IGNORE,
        Event.RESET: Transition(State.STOPPING, (_A.FORGET_CRASHES,)),
        Event.SPEC_CHANGED: Transition(State.STOPPING, (_A.FORGET_CRASHES,)),
        Event.REPLACE: Transition(State.STOPPING, (_A.FORGET_CRASHES,)),
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: _SUCCEED,
    },
    State.BACKOFF: {
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.STOPPED, (_A.CANCEL_TRY,)),
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        Event.HUNG: IGNORE,
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: IGNORE,
        Event.LOST: IGNORE,
        Event.CIRCUIT_OPENED: IGNORE,
        Event.CANNOT_WORK: IGNORE,
        Event.BACKOFF_ELAPSED: Transition(State.STARTING, (_A.SPAWN,)),
        Event.RESET: _TRY_NOW,
        Event.SPEC_CHANGED: _TRY_NOW,
        Event.REPLACE: _TRY_NOW,
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: IGNORE,
    },
    State.FAILED: {
        Event.WANT_UP: IGNORE,
        Event.WANT_DOWN: Transition(State.STOPPED, (_A.CANCEL_TRY,)),
        Event.READY: IGNORE,
        Event.START_FAILED: IGNORE,
        Event.START_TIMEOUT: IGNORE,
        Event.HUNG: IGNORE,
        Event.DRAINED: IGNORE,
        Event.STOP_TIMEOUT: IGNORE,
        Event.EXITED: IGNORE,
        Event.LOST: IGNORE,
        Event.CIRCUIT_OPENED: IGNORE,
        Event.CANNOT_WORK: IGNORE,
        Event.BACKOFF_ELAPSED: Transition(State.STARTING, (_A.SPAWN,)),
        Event.RESET: _TRY_NOW,
        Event.SPEC_CHANGED: _TRY_NOW,
        Event.REPLACE: _TRY_NOW,
        Event.SUCCESSOR_READY: IGNORE,
        Event.SUCCESSOR_LOST: IGNORE,
        Event.SUCCEEDED: IGNORE,
    },
}


def step(state: State, event: Event) -> Cell:
    """What `event` does in `state`; None means nothing.

    Raises:
        KeyError: the cell is missing, which is a bug of the table.
    """
    return TRANSITIONS[state][event]
