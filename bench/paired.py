"""Figures of two rivals that took turns: medians, how many times better ours is, and how sure.

A ratio is taken of each pair of turns, which stood next to each other in time, so that a machine
that slows down for a while slows both sides of it.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Pair:
    """One figure of both rivals.

    Attributes:
        ours: median.
        theirs: median.
        ratio: median over the turns; above 1 is better for us, whatever the figure. None where a
            turn has nothing to divide by.
        ratio_low: its lower 95 % confidence bound, by resampling turns.
    """

    ours: float
    theirs: float
    ratio: float | None
    ratio_low: float | None


def compare(ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> Pair:
    """Both sides of one figure, a value for each turn, in order."""
    better, worse = (ours, theirs) if higher_is_better else (theirs, ours)
    ratio = low = None
    if all(worse):
        ratios = [x / y for x, y in zip(better, worse, strict=True)]
        dice = random.Random(1)
        resampled = sorted(
            statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_BOOTSTRAPS)
        )
        ratio, low = statistics.median(ratios), resampled[int(_BOOTSTRAPS * 0.025)]
    return Pair(statistics.median(ours), statistics.median(theirs), ratio, low)
