"""The measured rate settles so that a step keeps its time, whatever the machine's speed."""

import pytest

from mlx_isolate_engine.generation.pacing import (
    BESIDE_TOKENS,
    FIRST_ALLOWANCE,
    GROW_MOST,
    PIECES_MAX,
    QUIET_STEPS,
    RATES_KEPT,
    SHRINK_MOST,
    SMALLEST_ALLOWANCE,
    TARGET_SHARE,
    PrefillPace,
)

MAX_STEP_S = 0.5
LARGE = 1 << 20


def run(pace: PrefillPace, tokens_per_s: float, steps: int = 30, pass_s: float = 0.0) -> None:
    for _ in range(steps):
        width = pace.width(1 << 30, 1)
        pace.observe(1, width, pass_s + width / tokens_per_s)


@pytest.mark.parametrize("rate", [200.0, 2_000.0, 50_000.0])
def test_a_step_settles_below_its_target_and_within_a_factor_of_two(rate: float) -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, rate)
    took = pace.width(1 << 30, 1) / rate
    assert MAX_STEP_S * TARGET_SHARE / 2 <= took <= MAX_STEP_S * TARGET_SHARE


def test_the_first_step_is_small_and_the_second_one_no_larger() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    assert pace.allowance() == pace.allowance(is_quiet=True) == FIRST_ALLOWANCE
    pace.observe(1, FIRST_ALLOWANCE, 1e-6)
    assert pace.allowance() == FIRST_ALLOWANCE


def test_a_first_step_that_compiles_does_not_count() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    pace.observe(1, FIRST_ALLOWANCE, 30.0)
    pace.observe(1, FIRST_ALLOWANCE, 0.005)
    assert pace.allowance() == FIRST_ALLOWANCE * GROW_MOST


def test_new_shapes_that_compile_leave_a_fast_machine_fast() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    run(pace, 100_000.0)
    for width in range(1500, 1600):
        pace.observe(1, width, 0.4)
    assert pace.allowance(is_quiet=True) == 2048 * PIECES_MAX


def test_one_slow_step_of_a_known_shape_does_not_count_beside_good_ones() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    run(pace, 1000.0)
    before, width = pace.allowance(), pace.width(1 << 30, 1)
    pace.observe(1, width, 1.8 * width / 1000.0)
    assert pace.allowance() == before


def test_a_machine_that_has_become_much_slower_is_believed_at_once() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, 10_000.0)
    width = pace.width(1 << 30, 1)
    pace.observe(1, width, width / 3000.0)
    assert pace.allowance() == pytest.approx(3000 * MAX_STEP_S * TARGET_SHARE, rel=0.01)


def test_a_machine_that_has_become_a_little_slower_is_believed_after_some_steps() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, 10_000.0)
    run(pace, 7_000.0, steps=RATES_KEPT)
    assert pace.allowance() == pytest.approx(7000 * MAX_STEP_S * TARGET_SHARE, rel=0.01)


def test_one_odd_step_changes_only_so_much() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, 10_000.0)
    before, width = pace.allowance(), pace.width(1 << 30, 1)
    pace.observe(1, width, 1000.0)
    assert pace.allowance() == pytest.approx(before * SHRINK_MOST, abs=1)


def test_small_quick_steps_teach_nothing() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, 10_000.0)
    before = pace.allowance()
    for _ in range(100):
        pace.observe(1, 5, 0.01)
    assert pace.allowance() == before


def test_the_allowance_stays_within_its_limits() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    run(pace, 1e9)
    assert pace.allowance() == BESIDE_TOKENS == 2048
    assert pace.allowance(is_quiet=True) == 2048 * PIECES_MAX
    run(pace, 1e-3, steps=100)
    assert pace.allowance() == SMALLEST_ALLOWANCE


def test_while_nobody_streams_a_step_may_take_longer() -> None:
    pace = PrefillPace(MAX_STEP_S, LARGE)
    run(pace, 1000.0)
    assert pace.allowance(is_quiet=True) == int(1000 * MAX_STEP_S * QUIET_STEPS)


@pytest.mark.parametrize("longest", [1, 199, 2000, 2048, 30_000])
def test_a_fast_machine_runs_whole_pieces(longest: int) -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    run(pace, 100_000.0)
    assert pace.width(longest, 1) == min(longest, 2048)


def test_a_piece_that_cuts_a_prompt_is_the_step_size_halved() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    run(pace, 1500.0)
    assert pace.allowance() == 450
    assert pace.width(6000, 1) == 256
    assert pace.width(6000, 3) == 128
    assert pace.width(6000, 10_000) == 1
    assert pace.width(449, 1) == 449


def test_seconds_are_guessed_high_until_something_was_measured() -> None:
    pace = PrefillPace(MAX_STEP_S, 2048)
    assert (pace.is_measured, pace.seconds(1)) == (False, MAX_STEP_S)
    run(pace, 1000.0)
    assert pace.is_measured
    assert pace.seconds(100) == pytest.approx(0.1)
