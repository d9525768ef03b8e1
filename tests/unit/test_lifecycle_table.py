"""The lifecycle table is complete, and it says what it should about the cells that matter."""

import pytest

from mlx_isolate_supervisor.slots.lifecycle import (
    TRANSITIONS,
    Action,
    Event,
    State,
    Transition,
    step,
)
from tests.architecture import lifecycle_page

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
    assert set(lifecycle_page.STATE_TEXTS) == set(State)
    assert set(lifecycle_page.EVENT_TEXTS) == set(Event)
    assert set(lifecycle_page.ACTION_TEXTS) == set(Action)


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


def moves() -> list[tuple[State, Event, Transition]]:
    """Every cell that is not empty."""
    cells = [(state, event, step(state, event)) for state in State for event in Event]
    return [(state, event, cell) for state, event, cell in cells if cell is not None]


# What has to happen on the way into a state from another one.
ON_ENTERING: dict[State, set[Action]] = {
    State.STARTING: {Action.SPAWN, Action.PROMOTE},
    State.DRAINING: {Action.DRAIN},
    State.STOPPING: {Action.TERMINATE, Action.ABORT},
    State.BACKOFF: {Action.SCHEDULE_TRY},
}


@pytest.mark.parametrize("entered", sorted(ON_ENTERING))
def test_a_state_is_entered_by_the_one_act_that_it_stands_for(entered: State) -> None:
    found = [(s, e, c) for s, e, c in moves() if c.state is entered is not s]
    assert found
    for state, event, cell in found:
        assert len(ON_ENTERING[entered] & set(cell.actions)) == 1, (state, event)


def test_a_faulty_engine_is_aborted_and_any_other_is_told_to_end() -> None:
    faults = {Event.HUNG, Event.START_FAILED, Event.START_TIMEOUT}
    for state, event, cell in moves():
        if cell.state is State.STOPPING is not state:
            assert (Action.ABORT in cell.actions) is (event in faults), (state, event)


def test_a_timer_of_a_try_is_set_where_one_is_due_and_gone_with_the_state() -> None:
    for state, event, cell in moves():
        is_due = cell.state is State.BACKOFF or event is Event.CIRCUIT_OPENED
        assert (Action.SCHEDULE_TRY in cell.actions) is is_due, (state, event)
        is_dropped = state in (State.BACKOFF, State.FAILED) and event is not Event.BACKOFF_ELAPSED
        assert (Action.CANCEL_TRY in cell.actions) is is_dropped, (state, event)


@pytest.mark.parametrize("event", [Event.RESET, Event.SPEC_CHANGED, Event.REPLACE])
@pytest.mark.parametrize("state", list(State))
def test_a_command_or_another_configuration_forgets_the_past_in_every_state(
    state: State, event: Event
) -> None:
    cell = step(state, event)
    assert cell is not None and Action.FORGET_CRASHES in cell.actions
    if state in (State.BACKOFF, State.FAILED):
        assert cell.state is State.STARTING


def test_what_a_ready_engine_does_for_its_successor() -> None:
    assert step(State.READY, Event.REPLACE) == Transition(
        State.READY, (Action.FORGET_CRASHES, Action.SPAWN_SUCCESSOR)
    )
    assert step(State.READY, Event.SUCCESSOR_READY) == Transition(State.READY, (Action.SWITCH,))
    for state in (State.READY, State.STOPPING):
        assert step(state, Event.SUCCEEDED) == Transition(State.STARTING, (Action.PROMOTE,))
        cell = step(state, Event.WANT_DOWN)
        assert cell is not None and Action.END_SUCCESSOR in cell.actions


def test_the_window_before_a_kill_has_an_end_and_a_shutdown_shortens_it() -> None:
    assert step(State.STOPPING, Event.STOP_TIMEOUT) == Transition(State.STOPPING, (Action.KILL,))
    cell = step(State.STOPPING, Event.WANT_DOWN)
    assert cell is not None and Action.LIMIT_STOP in cell.actions
    again = step(State.DRAINING, Event.WANT_DOWN)
    assert again == Transition(State.DRAINING, (Action.DRAIN,))


# Every way from one state to another; what is not here leads nowhere else.
WAYS: dict[State, dict[Event, State]] = {
    State.STOPPED: {Event.WANT_UP: State.STARTING},
    State.STARTING: {
        Event.READY: State.READY,
        Event.WANT_DOWN: State.STOPPING,
        Event.START_FAILED: State.STOPPING,
        Event.START_TIMEOUT: State.STOPPING,
        Event.SPEC_CHANGED: State.STOPPING,
        Event.REPLACE: State.STOPPING,
    },
    State.READY: {
        Event.WANT_DOWN: State.DRAINING,
        Event.SPEC_CHANGED: State.DRAINING,
        Event.HUNG: State.STOPPING,
        Event.SUCCEEDED: State.STARTING,
    },
    State.DRAINING: {Event.DRAINED: State.STOPPING, Event.HUNG: State.STOPPING},
    State.STOPPING: {Event.SUCCEEDED: State.STARTING},
    State.BACKOFF: {Event.BACKOFF_ELAPSED: State.STARTING, Event.WANT_DOWN: State.STOPPED},
    State.FAILED: {Event.BACKOFF_ELAPSED: State.STARTING, Event.WANT_DOWN: State.STOPPED},
}
ENDS = {
    Event.EXITED: State.STOPPED,
    Event.LOST: State.BACKOFF,
    Event.CIRCUIT_OPENED: State.FAILED,
    Event.CANNOT_WORK: State.FAILED,
}
NEW_TRY = dict.fromkeys((Event.RESET, Event.SPEC_CHANGED, Event.REPLACE), State.STARTING)


@pytest.mark.parametrize("state", list(State))
def test_there_is_no_other_way_from_state_to_state(state: State) -> None:
    expected = WAYS[state] | (ENDS if state in LIVE else {})
    if state in (State.BACKOFF, State.FAILED):
        expected |= NEW_TRY
    assert {e: c.state for s, e, c in moves() if s is state is not c.state} == expected


def test_the_loss_of_a_successor_is_told_though_nothing_changes() -> None:
    assert step(State.READY, Event.SUCCESSOR_LOST) == Transition(State.READY)
