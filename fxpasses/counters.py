"""Counters of the backend's work in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fake.notebook import as_html

__all__ = ["EAGER_FILE", "Fallback", "Isolated", "Stats", "reset_stats", "stats"]

EAGER_FILE = "eager.jsonl"
"""In the directory of a report: the functions that Dynamo left in eager, one a line."""


@dataclass(frozen=True)
class Fallback:
    """One graph, or one half of it, that runs in eager because a stage failed.

    Attributes:
        stage: the stage that failed.
        reason: the error's message.
        location: the node and the user's line, as text, or "".
    """

    stage: str
    reason: str
    location: str


@dataclass(frozen=True)
class Isolated:
    """A call that Inductor cannot lower, and that runs in eager between compiled parts (``on_failure="isolate"``).

    Attributes:
        graph: the kind of graph it is in: forward, backward or inference.
        node: its name there.
        target: the operator.
        source: the user's line, or "".
        module: the path of the module that ran it, or "".
        reason: what Inductor raised, in one line.
        repro: a file that shows it with torch alone, or "".
    """

    graph: str
    node: str
    target: str
    source: str
    module: str
    reason: str
    repro: str


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters.

    Attributes:
        graphs: Dynamo graphs handed to the backend.
        recompiles: those of them that replace an earlier compilation of the same code.
        copied_calls: calls of modules whose trace by Dynamo was copied from another module of the same class.
        cache_hits: graphs that came whole from AOTAutograd's cache, without running a pass.
        joint: joint graphs partitioned.
        forward: forward graphs compiled.
        backward: backward graphs compiled.
        inference: graphs without gradients compiled.
        regions: regions compiled: repeated layers, each kind once in a graph.
        region_calls: calls of regions in the graphs compiled.
        region_reports: for each graph, the last hundred of them: a :class:`fxpasses.RegionReport`.
        fallbacks: what runs in eager instead, and why.
        isolated: single calls that do, because Inductor cannot lower them.
        fixed_sizes: graphs that Inductor cannot lower with symbolic sizes, and that are compiled for those of each call.
        tuned: graphs that were tuned (see :func:`fxpasses.tune`).
        tuned_reused: graphs for which an earlier tuning was used.
        plans_used: plans of earlier processes that were loaded instead of compiling (see :func:`fxpasses.compile`).
        plans_written: plans written for later processes.
        plans_refused: why there is no plan of a compilation, and how often.
        seconds: time spent in each stage, in seconds: ``regions`` (looking for them, and putting calls in their place),
            ``tracing`` (AOTAutograd), ``passes``, ``checks`` (after each pass), ``partition``, and ``inductor``. What a
            stage spends in another one counts there only: together they are ``total``.
        pass_changes: for each pass, how many graphs it changed.
        pass_runs: for each pass, on how many graphs it ran; 0 for a pass of the user's that no graph so far was for.
    """

    graphs: int = 0
    recompiles: int = 0
    copied_calls: int = 0
    cache_hits: int = 0
    joint: int = 0
    forward: int = 0
    backward: int = 0
    inference: int = 0
    regions: int = 0
    region_calls: int = 0
    region_reports: tuple[object, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    isolated: tuple[Isolated, ...] = ()
    fixed_sizes: int = 0
    tuned: int = 0
    tuned_reused: int = 0
    plans_used: int = 0
    plans_written: int = 0
    plans_refused: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    pass_changes: dict[str, int] = field(default_factory=dict)
    pass_runs: dict[str, int] = field(default_factory=dict)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The passes that never changed anything, those that never ran included."""
        return tuple(name for name in self.pass_runs if name not in self.pass_changes)

    def _repr_html_(self) -> str:
        rows = [
            (name, _in_a_cell(value))
            for name, value in vars(self).items()
            if value and name not in ("fallbacks", "isolated", "region_reports")
        ]
        left = [
            *((f"{f.stage} in eager", f"{f.reason} {f.location}") for f in self.fallbacks),
            *((i.target, i.reason) for i in self.isolated),
        ]
        text = (
            "what the backend has done in this process"
            if rows or left
            else "nothing has been compiled in this process"
        )
        return as_html(text, ("", ""), [*rows, *left])


def _in_a_cell(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return ", ".join(
        f"{name} {n:.2f}" if isinstance(n, float) else f"{name} {n}" for name, n in value.items()
    )


class _Counters:
    """The one owner of the process-wide counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = Stats()
        self._running = threading.local()
        self._reported: set[str] = set()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by})

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """The time of this block, without that of such blocks inside, belongs to a stage."""
        around = getattr(self._running, "inner", None)
        self._running.inner = 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            self.move_seconds(stage, taken - self._running.inner)
            if around is None:
                self.move_seconds("total", taken)
            self._running.inner = None if around is None else around + taken

    def move_seconds(self, stage: str, seconds: float, from_stage: str = "") -> None:
        """Count time for one stage and take it from another.

        Args:
            stage: gets the time.
            seconds: how much.
            from_stage: loses it; none by default.
        """
        with self._lock:
            spent = dict(self._stats.seconds)
            spent[stage] = spent.get(stage, 0.0) + seconds
            if from_stage:
                spent[from_stage] = spent.get(from_stage, 0.0) - seconds
            self._stats = replace(self._stats, seconds=spent)

    def count_pass(self, name: str, *, changed: bool) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(now, pass_runs=_added(now.pass_runs, name, 1))
            if changed:
                self._stats = replace(self._stats, pass_changes=_added(now.pass_changes, name, 1))

    def count_refused_plan(self, reason: str) -> None:
        with self._lock:
            refused = self._stats.plans_refused
            self._stats = replace(self._stats, plans_refused=_added(refused, reason, 1))

    def first_report(self, name: str) -> bool:
        """Whether a pass has never changed anything, and nobody has said so yet."""
        with self._lock:
            first = name not in self._reported and name not in self._stats.pass_changes
            self._reported.add(name)
            return first

    def first_without_graph(self, name: str) -> bool:
        """Whether a pass has never run, and nobody has said so yet."""
        with self._lock:
            runs = self._stats.pass_runs
            first = name not in runs
            if first:
                self._stats = replace(self._stats, pass_runs={**runs, name: 0})
            return first

    def add_fallback(self, fallback: Fallback) -> None:
        with self._lock:
            self._stats = replace(self._stats, fallbacks=(*self._stats.fallbacks, fallback))

    def add_isolated(self, isolated: Isolated) -> None:
        with self._lock:
            self._stats = replace(self._stats, isolated=(*self._stats.isolated, isolated))

    def add_region_report(self, report: object, regions: int, calls: int) -> None:
        """Count the regions of a graph and keep its report; the last hundred are kept.

        Args:
            report: a :class:`fxpasses.RegionReport`.
            regions: how many regions were compiled.
            calls: how many calls of them the graph has.
        """
        with self._lock:
            now = self._stats
            reports = (*now.region_reports[-99:], report)
            self._stats = replace(
                now,
                regions=now.regions + regions,
                region_calls=now.region_calls + calls,
                region_reports=reports,
            )

    def snapshot(self) -> Stats:
        with self._lock:
            return self._stats

    def reset(self) -> None:
        with self._lock:
            self._stats = Stats()
            self._reported = set()


def _added(table: dict, key: str, amount: float) -> dict:
    return {**table, key: table.get(key, 0) + amount}


counters = _Counters()


def stats() -> Stats:
    """The counters of the backend's work in this process so far.

    >>> from fxpasses import reset_stats, stats
    >>> reset_stats()
    >>> stats().graphs
    0
    """
    return counters.snapshot()


def reset_stats() -> None:
    """Set all counters back to zero."""
    counters.reset()
