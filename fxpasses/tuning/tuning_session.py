"""Tuning sessions: the time limit, the goal, the candidates and the results."""

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
    """The settings of one call of :func:`fxpasses.tune`, in place of its passes: Dynamo recompiles for each.

    Attributes:
        seconds: the time limit for all graphs together.
        goal: what counts as better.
        passes: the passes to choose from; ``None`` for those of the library that preserve results.
        allowed: further passes to choose from, whose results may differ from eager.
        clock: returns the seconds that are compared.
        tell: reports progress.
        fresh: whether to ignore the kept results of earlier tuning.
        cache: where results are kept, as for :func:`fxpasses.compile`.
        results: the result for each graph.
        places: the place of each result.
        known: results that are valid even if they are not on disk, with their places.
        reused: how many results were kept by an earlier tuning.
        spent: the seconds that counted before ``since``.
        since: when the time that counts began, by ``time.monotonic``; ``None`` while none counts.
        interrupted: whether the user stopped it.
        untuned: the reason for each graph that was not tuned.
        takes_any: whether results of an earlier tuning are valid whatever it chose from.
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
        """Return the goal and the candidates as text, passes with digests of what they do."""
        if (self.goal, self.passes, self.allowed) == ("time", None, ()):
            return super().told()
        named = [[(str(item), item.identity()) for item in of or ()] for of in (self.passes, self.allowed)]
        return f"{super().told()} {self.goal} {self.passes is None} {named}"

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Count the time of a call of :func:`fxpasses.tune`, including the searches of graphs within it."""
        if self.since is not None:
            yield
            return
        start = self.since = time.monotonic()
        try:
            yield
        finally:
            self.spent, self.since = self.spent + time.monotonic() - start, None

    def seconds_left(self) -> float:
        """Return the seconds until the time is up."""
        now = 0.0 if self.since is None else time.monotonic() - self.since
        return 0.0 if self.interrupted else self.seconds - self.spent - now
