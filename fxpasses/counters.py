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
"""File in a report's directory: the functions that Dynamo left in eager, one per line."""


@dataclass(frozen=True)
class Fallback:
    """One graph, or its forward or backward half, that runs in eager because a stage failed.

    Attributes:
        stage: the stage that failed.
        reason: the error message.
        location: the node and the user's line, as text, or "".
    """

    stage: str
    reason: str
    location: str


@dataclass(frozen=True)
class Isolated:
    """A call that Inductor cannot lower, run in eager between compiled parts (``on_failure="isolate"``).

    Attributes:
        graph: the kind of graph that contains it: forward, backward or inference.
        node: its name in that graph.
        target: the operator.
        source: the user's line, or "".
        module: the path of the module that ran it, or "".
        reason: Inductor's error, in one line.
        repro: a file that reproduces the error with torch alone, or "".
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
        recompiles: how many of these graphs replace an earlier compilation of the same code.
        copied_calls: module calls whose Dynamo trace was copied from another module of the same class.
        cache_hits: graphs taken whole from AOTAutograd's cache, without running a pass.
        joint: joint graphs partitioned.
        forward: forward graphs compiled.
        backward: backward graphs compiled.
        inference: graphs without gradients compiled.
        regions: regions compiled. A region is a repeated layer; each kind is compiled once per graph.
        region_calls: calls of regions in the compiled graphs.
        region_reports: one :class:`fxpasses.RegionReport` per graph, for the last hundred graphs.
        fallbacks: what runs in eager instead, and why.
        isolated: single calls that run in eager because Inductor cannot lower them.
        fixed_sizes: graphs that Inductor cannot lower with symbolic sizes, compiled for the sizes of each
            call instead.
        tuned: graphs that were tuned (see :func:`fxpasses.tune`).
        tuned_reused: graphs that reused an earlier tuning.
        plans_used: plans of earlier processes that were loaded instead of compiling (see
            :func:`fxpasses.compile`).
        plans_written: plans written for later processes.
        plans_refused: for each reason why a compilation has no plan, how often it occurred.
        seconds: seconds spent in each stage: ``regions`` (finding them and replacing them by calls),
            ``tracing`` (AOTAutograd), ``passes``, ``checks`` (after each pass), ``partition``, and
            ``inductor``. Time in a nested stage counts for the nested stage only. The stages add up to
            ``total``.
        pass_changes: for each pass, how many graphs it changed.
        pass_runs: for each pass, how many graphs it ran on; 0 for a user's pass that no graph so far was for.
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
        """The passes that never changed anything, including those that never ran."""
        return tuple(name for name in self.pass_runs if name not in self.pass_changes)

    def _repr_html_(self) -> str:
        rows = [
            (name, _cell_text(value))
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


def _cell_text(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return ", ".join(
        f"{name} {n:.2f}" if isinstance(n, float) else f"{name} {n}" for name, n in value.items()
    )


class _Counters:
    """The only owner of the process-wide counters."""

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
        """Attribute the time of this block, without that of nested ``timed`` blocks, to a stage."""
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
        """Add time to one stage, and optionally subtract it from another.

        Args:
            stage: receives the time.
            seconds: how much.
            from_stage: loses the time; none by default.
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
            self._stats = replace(now, pass_runs=_incremented(now.pass_runs, name, 1))
            if changed:
                self._stats = replace(self._stats, pass_changes=_incremented(now.pass_changes, name, 1))

    def count_refused_plan(self, reason: str) -> None:
        with self._lock:
            refused = self._stats.plans_refused
            self._stats = replace(self._stats, plans_refused=_incremented(refused, reason, 1))

    def first_report(self, name: str) -> bool:
        """Whether a pass never changed anything and nobody reported it yet. Marks it as reported."""
        with self._lock:
            first = name not in self._reported and name not in self._stats.pass_changes
            self._reported.add(name)
            return first

    def first_without_graph(self, name: str) -> bool:
        """Whether a pass never ran and nobody reported it yet. Marks it as reported."""
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
        """Count the regions of a graph and store its report. Only the last hundred reports are stored.

        Args:
            report: a :class:`fxpasses.RegionReport`.
            regions: the number of regions compiled.
            calls: the number of region calls in the graph.
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


def _incremented(table: dict, key: str, amount: float) -> dict:
    return {**table, key: table.get(key, 0) + amount}


counters = _Counters()


def stats() -> Stats:
    """Return a snapshot of the backend's counters in this process.

    >>> from fxpasses import reset_stats, stats
    >>> reset_stats()
    >>> stats().graphs
    0
    """
    return counters.snapshot()


def reset_stats() -> None:
    """Reset all counters to zero."""
    counters.reset()
