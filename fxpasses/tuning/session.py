"""How graphs are tuned: time, goal, candidates, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fxpasses.pass_manager.contract import Pass
from fxpasses.passes import TunedPasses
from fxpasses.tuning.kept import Kept
from fxpasses.tuning.measuring import wall_clock
from fxpasses.tuning.search import Goal

__all__ = ["Session"]


@dataclass(eq=False)
class Session(TunedPasses):
    """The settings of one call of :func:`fxpasses.tune`, in the place of its passes: Dynamo compiles anew for each.

    Attributes:
        seconds: how long may be spent, on all graphs together.
        goal: what is better.
        passes: the passes to choose from; ``None`` for those of the library that keep results.
        allowed: passes to choose from as well, whose results need not be eager's.
        clock: gives the seconds that are compared.
        tell: says what is done.
        fresh: whether what is kept of earlier tuning is left aside.
        cache: where results are kept: as for :func:`fxpasses.compile`.
        results: what was found, one a graph.
        reused: how many of the results were kept by an earlier tuning.
        started: when, by the wall clock.
        interrupted: whether the user stopped it.
    """

    seconds: float = 60.0
    goal: Goal = "time"
    passes: tuple[Pass, ...] | None = None
    allowed: tuple[Pass, ...] = ()
    clock: Callable[[], float] = wall_clock
    tell: Callable[[str], None] = lambda what: None
    fresh: bool = False
    cache: str = "auto"
    results: list[Kept] = field(default_factory=list)
    reused: int = 0
    started: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def seconds_left(self) -> float:
        """Until the time is up."""
        return 0.0 if self.interrupted else self.started + self.seconds - time.monotonic()
