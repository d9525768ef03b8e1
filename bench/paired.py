"""Figures of two rivals that took turns: medians, how many times better ours is, and how sure.

A ratio is taken of each pair of turns, which stood next to each other in time, so that a machine
that slows down for a while slows both sides of it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.paired_ratio import paired_ratio


@dataclass(frozen=True)
class Pair:
    """One figure of both rivals.

    Attributes:
        ours: median.
        theirs: median.
        ratio: of both turns of a pair (see `paired_ratio`); above 1 is better for us, whatever the
            figure. None where a turn has nothing to divide, or to divide by.
        ratio_low: the lower end of its 95 % interval; None also where there are too few turns.
        ours_range: the lowest and the highest turn.
        theirs_range: of theirs.
    """

    ours: float
    theirs: float
    ratio: float | None
    ratio_low: float | None
    ours_range: tuple[float, float]
    theirs_range: tuple[float, float]


def compare(ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> Pair:
    """Both sides of one figure, a value for each turn, in order."""
    better, worse = (ours, theirs) if higher_is_better else (theirs, ours)
    ratio = low = None
    if all(better) and all(worse):
        found = paired_ratio(better, worse)
        ratio, low = found.middle, found.low
    return Pair(
        statistics.median(ours),
        statistics.median(theirs),
        ratio,
        low,
        (min(ours), max(ours)),
        (min(theirs), max(theirs)),
    )
