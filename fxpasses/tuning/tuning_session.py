"""How graphs are tuned: time, goal, candidates, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fxpasses.pass_manager.pass_base import Pass
from fxpasses.passes import TunedPasses
from fxpasses.tuning.kept import Kept, Place
from fxpasses.tuning.measuring import wall_clock
from fxpasses.tuning.search import Goal


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
        places: the place of each of them.
        known: results that hold though they may not be on disk, with their places.
        reused: how many of the results were kept by an earlier tuning.
        spent: seconds that counted before that.
        since: when the time that counts began, by the wall clock; ``None`` while none does.
        interrupted: whether the user stopped it.
        untuned: why graphs were not tuned, one a graph.
        takes_any: whether what an earlier tuning found holds whatever it chose from.
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
    places: list[Place] = field(default_factory=list)
    known: list[tuple[Place, Kept]] = field(default_factory=list)
    reused: int = 0
    spent: float = 0.0
    since: float | None = None
    interrupted: bool = False
    untuned: list[str] = field(default_factory=list)
    takes_any: bool = False

    def told(self) -> str:
        """The goal and what may be chosen, passes with digests of what they do."""
        if (self.goal, self.passes, self.allowed) == ("time", None, ()):
            return super().told()
        named = [[(str(item), item.identity()) for item in of or ()] for of in (self.passes, self.allowed)]
        return f"{super().told()} {self.goal} {self.passes is None} {named}"

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Time that counts: all of a call of :func:`fxpasses.tune`, what the search of a graph takes within it included."""
        if self.since is not None:
            yield
            return
        start = self.since = time.monotonic()
        try:
            yield
        finally:
            self.spent, self.since = self.spent + time.monotonic() - start, None

    def seconds_left(self) -> float:
        """Until the time is up."""
        now = 0.0 if self.since is None else time.monotonic() - self.since
        return 0.0 if self.interrupted else self.seconds - self.spent - now
