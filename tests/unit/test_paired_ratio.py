"""The serving bench's ratio and its interval."""

import random

import pytest
from bench.paired_ratio import lowest_rank, paired_ratio


# Critical values of the signed-rank test, two-sided 5 %, from statistical tables.
@pytest.mark.parametrize(("rounds", "critical"), [(6, 0), (7, 2), (10, 8), (15, 25), (20, 52)])
def test_the_rank_is_that_of_the_tables(rounds: int, critical: int) -> None:
    assert lowest_rank(rounds) == critical


def test_five_rounds_have_no_interval() -> None:
    assert lowest_rank(5) is None
    assert paired_ratio([2.0] * 5, [1.0] * 5).low is None


def test_equal_rounds_give_their_ratio() -> None:
    ratio = paired_ratio([3.0] * 8, [2.0] * 8)
    assert ratio.middle == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5)


def test_one_odd_round_moves_little() -> None:
    usual = [1.09, 1.1, 1.11] * 5
    even = paired_ratio(usual, [1.0] * 15)
    odd = paired_ratio([*usual[:-1], 0.01], [1.0] * 15)
    assert odd.middle == pytest.approx(even.middle, rel=0.01)
    assert odd.low is not None and odd.low > 1.05


def test_turned_around_it_is_the_inverse() -> None:
    a, b = [3.0, 4.0, 5.0, 6.5], [2.0, 2.5, 4.0, 3.0]
    assert paired_ratio(a, b).middle == pytest.approx(1 / paired_ratio(b, a).middle)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    dice = random.Random(7)
    trials, rounds = 1000, 12
    missed = 0
    for _ in range(trials):
        over = [dice.lognormvariate(0.1, 0.2) for _ in range(rounds)]
        under = [dice.lognormvariate(0.1, 0.2) for _ in range(rounds)]
        low = paired_ratio(over, under).low
        assert low is not None
        missed += low > 1.0
    assert 10 <= missed <= 40  # 25 expected
