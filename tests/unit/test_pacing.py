"""The prefill allowance settles so that a step keeps its time, whatever the machine's speed."""

import pytest

from mlx_isolate_engine.generation.pacing import (
    FIRST_ALLOWANCE,
    GROW_MOST,
    SHRINK_MOST,
    SMALLEST_ALLOWANCE,
    TARGET_SHARE,
    PrefillPace,
)

MAX_STEP_S = 0.5


def settle(pace: PrefillPace, tokens_per_s: float, steps: int = 30) -> None:
    for _ in range(steps):
        pace.observe(pace.allowance, pace.allowance / tokens_per_s)


@pytest.mark.parametrize("rate", [200.0, 2_000.0, 50_000.0])
def test_a_step_settles_at_its_target(rate: float) -> None:
    pace = PrefillPace(MAX_STEP_S, largest=1_000_000)
    settle(pace, rate)
    assert pace.allowance / rate == pytest.approx(MAX_STEP_S * TARGET_SHARE, rel=0.1)


def test_the_first_step_is_small() -> None:
    assert PrefillPace(MAX_STEP_S, largest=16384).allowance == FIRST_ALLOWANCE


def test_a_slowdown_is_answered_in_the_next_step() -> None:
    pace = PrefillPace(MAX_STEP_S, largest=1_000_000)
    settle(pace, 10_000.0)
    before = pace.allowance
    pace.observe(before, MAX_STEP_S * 2)
    assert pace.allowance <= before * TARGET_SHARE / 2 * 1.01


def test_one_odd_step_changes_only_so_much() -> None:
    pace = PrefillPace(MAX_STEP_S, largest=1_000_000)
    settle(pace, 10_000.0)
    before = pace.allowance
    pace.observe(before, 1000.0)
    assert pace.allowance == pytest.approx(before * SHRINK_MOST, abs=1)
    pace.observe(pace.allowance, 1e-9)
    assert pace.allowance == pytest.approx(before * SHRINK_MOST * GROW_MOST, abs=2)


def test_small_quick_steps_teach_nothing() -> None:
    pace = PrefillPace(MAX_STEP_S, largest=1_000_000)
    settle(pace, 10_000.0)
    before = pace.allowance
    for _ in range(100):
        pace.observe(5, 0.01)
    assert pace.allowance == before


def test_the_allowance_stays_within_its_limits() -> None:
    pace = PrefillPace(MAX_STEP_S, largest=4096)
    settle(pace, 1e9)
    assert pace.allowance == 4096
    settle(pace, 1e-3, steps=50)
    assert pace.allowance == SMALLEST_ALLOWANCE


def test_rows_share_the_allowance_and_each_gets_something() -> None:
    pace = PrefillPace(MAX_STEP_S, largest=4096)
    assert pace.row_share(0) == FIRST_ALLOWANCE
    assert pace.row_share(4) == FIRST_ALLOWANCE // 4
    assert pace.row_share(10_000) == 1
