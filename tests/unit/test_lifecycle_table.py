"""The lifecycle table is complete, and it says what it should about the cells that matter."""

import pytest

from mlx_isolate_supervisor.slots import lifecycle
from mlx_isolate_supervisor.slots.lifecycle import TRANSITIONS, Action, Event, State, step

# States in which an engine process exists.
LIVE = frozenset({State.STARTING, State.READY, State.DRAINING, State.STOPPING})
EXITS = (Event.EXITED, Event.LOST, Event.CIRCUIT_OPENED, Event.CANNOT_WORK)


def test_every_cell_is_present() -> None:
    assert set(TRANSITIONS) == set(State)
    for state in State:
        assert set(TRANSITIONS[state]) == set(Event), state


def test_a_missing_cell_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TRANSITIONS[State.READY], Event.HUNG)
    with pytest.raises(KeyError):
        step(State.READY, Event.HUNG)


def test_every_word_is_explained() -> None:
    assert set(lifecycle.STATE_TEXTS) == set(State)
    assert set(lifecycle.EVENT_TEXTS) == set(Event)
    assert set(lifecycle.ACTION_TEXTS) == set(Action)


def test_a_process_is_spawned_only_where_none_lives() -> None:
    for state in State:
        for event in Event:
            cell = step(state, event)
            if cell is not None and Action.SPAWN in cell.actions:
                assert state not in LIVE
                assert cell.state is State.STARTING


@pytest.mark.parametrize("state", sorted(LIVE))
def test_every_exit_leaves_a_live_state(state: State) -> None:
    for event in EXITS:
        cell = step(state, event)
        assert cell is not None and cell.state not in LIVE


@pytest.mark.parametrize("state", sorted(LIVE))
def test_a_live_state_is_left_by_an_exit_only(state: State) -> None:
    for event in set(Event) - set(EXITS):
        cell = step(state, event)
        assert cell is None or cell.state in LIVE


def test_a_successor_starts_only_beside_a_ready_engine() -> None:
    for state in State:
        for event in Event:
            cell = step(state, event)
            if cell is not None and Action.SPAWN_SUCCESSOR in cell.actions:
                assert state is cell.state is State.READY


def test_leaving_ready_for_down_ends_a_successor() -> None:
    for event in (Event.WANT_DOWN, Event.SPEC_CHANGED):
        cell = step(State.READY, event)
        assert cell is not None and Action.END_SUCCESSOR in cell.actions


def test_everything_that_waits_has_a_way_out() -> None:
    for state, event in (
        (State.STARTING, Event.START_TIMEOUT),
        (State.READY, Event.HUNG),
        (State.DRAINING, Event.DRAINED),
        (State.DRAINING, Event.HUNG),
        (State.STOPPING, Event.STOP_TIMEOUT),
        (State.BACKOFF, Event.BACKOFF_ELAPSED),
        (State.FAILED, Event.RESET),
    ):
        assert step(state, event) is not None


def test_entering_failed_refuses_those_who_wait() -> None:
    for state in State:
        for event in Event:
            cell = step(state, event)
            if cell is not None and cell.state is State.FAILED:
                assert Action.REFUSE_WAITERS in cell.actions


def test_a_failed_model_is_not_woken_by_a_request() -> None:
    assert step(State.FAILED, Event.WANT_UP) is None
