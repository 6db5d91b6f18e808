"""Tuning sessions: the time limit, the goal, the candidates and the results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fxpasses.pass_manager.pass_base import Pass
from fxpasses.passes import TunedPasses
from fxpasses.tuning.kept import ResultLocation, TuningResult
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
        report_progress: reports progress.
        fresh: whether to ignore the kept results of earlier tuning.
        cache: where results are kept, as for :func:`fxpasses.compile`.
        results: the result for each graph.
        locations: the location of each result.
        known: results that are valid even if they are not on disk, with their locations.
        reused: how many results were kept by an earlier tuning.
        spent_seconds: the seconds that counted before ``started_at``.
        started_at: when the time that counts began, by ``time.monotonic``; ``None`` while none counts.
        interrupted: whether the user stopped it.
        untuned: the reason for each graph that was not tuned.
        accepts_any_candidates: whether results of an earlier tuning are valid whatever it chose from.
    """

    seconds: float = 60.0
    goal: Goal = "time"
    passes: tuple[Pass, ...] | None = None
    allowed: tuple[Pass, ...] = ()
    clock: Callable[[], float] = wall_clock
    report_progress: Callable[[str], None] = lambda what: None
    fresh: bool = False
    cache: str = "auto"
    results: list[TuningResult] = field(default_factory=list)
    locations: list[ResultLocation] = field(default_factory=list)
    known: list[tuple[ResultLocation, TuningResult]] = field(default_factory=list)
    reused: int = 0
    spent_seconds: float = 0.0
    started_at: float | None = None
    interrupted: bool = False
    untuned: list[str] = field(default_factory=list)
    accepts_any_candidates: bool = False

    def told(self) -> str:
        """Return the goal and the candidates as text, passes with digests of what they do."""
        if (self.goal, self.passes, self.allowed) == ("time", None, ()):
            return super().told()
        named = [
            [(str(item), item.identity()) for item in passes or ()] for passes in (self.passes, self.allowed)
        ]
        return f"{super().told()} {self.goal} {self.passes is None} {named}"

    @contextlib.contextmanager
    def count_time(self) -> Iterator[None]:
        """Count the time of a call of :func:`fxpasses.tune`, including the searches of graphs within it."""
        if self.started_at is not None:
            yield
            return
        start = self.started_at = time.monotonic()
        try:
            yield
        finally:
            self.spent_seconds, self.started_at = self.spent_seconds + time.monotonic() - start, None

    def seconds_left(self) -> float:
        """Return the seconds until the time is up."""
        now = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        return 0.0 if self.interrupted else self.seconds - self.spent_seconds - now
