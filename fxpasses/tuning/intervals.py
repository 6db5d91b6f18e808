"""Confidence intervals of ratios measured in pairs: medians, with no assumption on the distribution of noise.

A pair is the time of one program over that of another, measured side by side, so that a slow moment of the
machine hits both. The interval of the median of ``n`` pairs runs from the k-th smallest to the k-th largest.
It misses the median only if fewer than ``k`` of ``n`` fair coins show one side. A few outliers do not move
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = (8, 16, 32, 64)
"""The numbers of pairs after which a duel checks its interval."""

RISK = 0.05 / len(LOOKS)
"""The probability that the interval of one look misses the median. All looks together have 5%."""


@dataclass(frozen=True)
class Interval:
    """A median ratio with its 95% confidence interval.

    Attributes:
        low: the lower end.
        middle: the median.
        high: the upper end.
    """

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(ratios: Sequence[float], risk: float = RISK) -> Interval:
    """Return the confidence interval of the median of some ratios.

    Args:
        ratios: at least one ratio, each of one pair.
        risk: the probability that the interval misses the median. With too few pairs for it, the interval is
            unbounded.

    >>> print(median_interval([0.9, 0.91, 0.89, 0.9, 2.0, 0.9, 0.92, 0.88], risk=0.05))
    0.900 [0.880, 2.000]
    """
    sorted_ratios = sorted(ratios)
    rank, probability = 0, 0.5 ** len(sorted_ratios)
    total = 2 * probability
    while total <= risk and rank < len(sorted_ratios) // 2:
        rank += 1
        probability *= (len(sorted_ratios) - rank + 1) / rank
        total += 2 * probability
    ends = (sorted_ratios[rank - 1], sorted_ratios[-rank]) if rank else (0.0, math.inf)
    return Interval(ends[0], statistics.median(sorted_ratios), ends[1])
