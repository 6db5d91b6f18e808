"""Flaky scripts: how often to run a script to tell whether it fails, and the statistics of the counts.

If a compilation has the fault, the script fails as often as it normally does; if not, as often as in eager.
The likelihood ratio of its runs decides between the two (A. Wald, "Sequential Tests of Statistical
Hypotheses", 1945).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_CERTAIN = 0.99
_BOUND = math.log(_CERTAIN / (1 - _CERTAIN))
"""The evidence of one run of a script that is not flaky."""


@dataclass(frozen=True)
class Answer:
    """The runs of a script with one compilation.

    Attributes:
        runs: how many there were.
        failed: how many of them failed.
        record: what the last run reached, or the last one that reached any passes.
        output: the end of the output of the last failed run, or of the last run.
    """

    runs: int = 0
    failed: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @property
    def is_mixed(self) -> bool:
        """Whether some failed and some did not."""
        return 0 < self.failed < self.runs

    def plus(self, other: Answer) -> Answer:
        """Add other, later runs to these."""
        record = other.record if "passes" in other.record or not self.record else self.record
        output = other.output if other.failed or not self.failed else self.output
        return Answer(self.runs + other.runs, self.failed + other.failed, record, output)

    def __str__(self) -> str:
        return f"{self.failed} of {self.runs} run{'s' * (self.runs != 1)}"


@dataclass(frozen=True)
class Odds:
    """The failure rate of a script.

    Attributes:
        guilty: the probability of a failure with a compilation that has the fault.
        innocent: the same for one that has not.
        flaky: whether these are estimates for a script that fails only sometimes.

    >>> Odds().verdict(Answer(1, 1))
    True
    >>> sometimes = Odds.of(Answer(12, 4), Answer(12, 0))
    >>> sometimes.verdict(Answer(3, 0)) is None  # which says nothing yet
    True
    """

    guilty: float = _CERTAIN
    innocent: float = 1 - _CERTAIN
    flaky: bool = False

    @classmethod
    def of(cls, guilty: Answer, innocent: Answer) -> Odds:
        """Estimate from runs with the full compilation, and without.

        The estimates are moved one standard deviation towards each other: a fault that failed often by luck
        would get too few runs.
        """
        (high, off), (low, more) = (_rate_and_deviation(answer) for answer in (guilty, innocent))
        middle = (high + low) / 2
        return cls(
            min(max(high - off, middle), _CERTAIN),
            max(min(low + more, middle * 0.9), 1 - _CERTAIN),
            flaky=True,
        )

    def verdict(self, answer: Answer, confidence: float = 1.0) -> bool | None:
        """Whether a compilation has the fault; ``None`` while its runs do not decide.

        Args:
            answer: the runs.
            confidence: the required confidence, as a multiple of that of one run of a script that is not flaky.
        """
        works = answer.runs - answer.failed
        likelihood = answer.failed * math.log(self.guilty / self.innocent)
        likelihood += works * math.log((1 - self.guilty) / (1 - self.innocent))
        if abs(likelihood) < _BOUND * confidence * (1 - 1e-9):
            return None
        return likelihood > 0


def _rate_and_deviation(answer: Answer) -> tuple[float, float]:
    """The failure rate, and the standard deviation of the estimate."""
    rate = (answer.failed + 0.5) / (answer.runs + 1)
    return rate, math.sqrt(rate * (1 - rate) / (answer.runs + 1))


def fisher_p_value(a: Answer, b: Answer) -> float:
    """Return the probability that ``a`` fails this much more often than ``b``, if both fail equally often.

    Fisher's exact test, one-sided.

    >>> round(fisher_p_value(Answer(10, 5), Answer(10, 0)), 3)
    0.016
    """
    failed, runs = a.failed + b.failed, a.runs + b.runs
    ways = (
        math.comb(a.runs, k) * math.comb(b.runs, failed - k)
        for k in range(a.failed, min(a.runs, failed) + 1)
        if failed - k <= b.runs
    )
    return sum(ways) / math.comb(runs, failed)
