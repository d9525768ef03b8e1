"""Backoff and circuit breaker by the numbers."""

import pytest

from mlx_isolate_shared.config import EXIT_CANNOT_WORK
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.slots.restart import (
    Ending,
    Judgement,
    RestartBudget,
    after_completion,
    half_open_delay_s,
    judge,
    respawn_delay_s,
)
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings

SETTINGS = RestartSettings()


def crash(budget: RestartBudget, now: float, *, completed: bool = False) -> Judgement:
    ending = Ending(wanted=True, planned=False, code=None, completed=completed)
    return judge(ending, budget, now=now, jitter=0.0, settings=SETTINGS)


@pytest.mark.case("17")
def test_the_delay_grows_with_the_crashes_of_the_last_minute() -> None:
    budget, delays = RestartBudget(), []
    for second in range(9):
        judgement = crash(budget, float(second), completed=True)
        assert judgement.event is Event.LOST
        budget = judgement.budget
        delays.append(judgement.delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


# A machine that has run for long counts from far away.
@pytest.mark.parametrize("began", [0.0, 1e6])
def test_crashes_older_than_the_window_are_forgotten(began: float) -> None:
    budget = crash(RestartBudget(), began, completed=True).budget
    assert crash(budget, began + 59.9, completed=True).delay_s == 0.5
    assert crash(budget, began + 60.0, completed=True).delay_s == 0.0


@pytest.mark.parametrize(("jitter", "delay"), [(-1.0, 3.2), (0.0, 4.0), (1.0, 4.8)])
def test_jitter_is_a_fifth_either_way(jitter: float, delay: float) -> None:
    assert respawn_delay_s(SETTINGS, 5, jitter) == pytest.approx(delay)


def test_five_in_a_row_without_a_completion_open_the_circuit() -> None:
    budget, events = RestartBudget(), []
    for number in range(5):
        judgement = crash(budget, number * 1000.0)
        budget = judgement.budget
        events.append(judgement.event)
    assert events == [Event.LOST] * 4 + [Event.CIRCUIT_OPENED]


def test_one_completion_ends_the_streak_but_not_the_delay() -> None:
    budget = RestartBudget()
    for second in range(4):
        budget = crash(budget, float(second)).budget
    budget = after_completion(budget)
    judgement = crash(budget, 4.0, completed=True)
    assert judgement.event is Event.LOST
    assert judgement.budget.streak == 0
    assert judgement.delay_s == 4.0


def test_a_failed_half_open_try_doubles_the_pause_up_to_ten_minutes() -> None:
    pauses = [half_open_delay_s(SETTINGS, streak) for streak in range(5, 12)]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert half_open_delay_s(SETTINGS, 10_000) == 600.0


def test_a_planned_end_is_no_crash() -> None:
    ending = Ending(wanted=True, planned=True, code=0, completed=False)
    budget = RestartBudget(crashes=(1.0, 2.0), streak=4)
    judgement = judge(ending, budget, now=3.0, jitter=0.0, settings=SETTINGS)
    assert judgement == Judgement(event=Event.LOST, budget=budget, delay_s=0.0)


def test_exit_78_is_final_whatever_the_budget() -> None:
    ending = Ending(wanted=True, planned=False, code=EXIT_CANNOT_WORK, completed=True)
    judgement = judge(ending, RestartBudget(), now=0.0, jitter=0.0, settings=SETTINGS)
    assert judgement.event is Event.CANNOT_WORK
    assert judgement.delay_s is None


@pytest.mark.parametrize("code", [None, 0, 1, EXIT_CANNOT_WORK])
def test_an_end_that_nobody_minds_is_an_exit(code: int | None) -> None:
    ending = Ending(wanted=False, planned=False, code=code, completed=False)
    judgement = judge(ending, RestartBudget(), now=0.0, jitter=0.0, settings=SETTINGS)
    assert judgement == Judgement(event=Event.EXITED, budget=RestartBudget())


def test_the_budget_stays_small() -> None:
    budget = RestartBudget()
    for number in range(1000):
        budget = crash(budget, number / 1000.0).budget
    assert len(budget.crashes) == len(SETTINGS.delays_s)
