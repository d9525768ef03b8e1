"""The ratio of paired rounds, with an interval that a few odd rounds do not widen; pure.

A round in which one side prepares a kernel, or another process takes the machine, is off by far
and says nothing. The signed-rank interval (Wilcoxon, Hodges and Lehmann) of the logarithms needs no
distribution but symmetry, and is nearly as tight as Student's where that would do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A ratio, and the lower end of its two-sided 95 % interval.

    Attributes:
        low: None where there are too few rounds for such an interval (less than six).
    """

    middle: float
    low: float | None


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Of positive figures, each pair of one round."""
    logs = [math.log(a / b) for a, b in zip(over, under, strict=True)]
    means = sorted((a + b) / 2 for place, a in enumerate(logs) for b in logs[place:])
    rank = lowest_rank(len(logs))
    return Ratio(
        middle=math.exp((means[(len(means) - 1) // 2] + means[len(means) // 2]) / 2),
        low=math.exp(means[rank]) if rank is not None else None,
    )


def lowest_rank(rounds: int, tail: float = 0.025) -> int | None:
    """Which of the sorted pairwise means (from 0) is the lower end; None = not even the first.

    That many of the means lie below the true middle with a chance of at most `tail`: the sum of
    the ranks 1 to `rounds`, each taken or not with equal chances, is distributed likewise.
    """
    ways = [1]
    for rank in range(1, rounds + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    below, place = 0, 0
    while (below + ways[place]) / 2**rounds <= tail:
        below += ways[place]
        place += 1
    return place - 1 if place else None
