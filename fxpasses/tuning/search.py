"""The search: try one step after the other, and keep each only if it measures better and is proved equal.

The most promising step is first. The search knows nothing of graphs and compilers; it asks a
:class:`Workbench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from fake.error_text import first_line
from fxpasses.exact.time_limit import OutOfTime
from fxpasses.tuning.choice import Choice, Step
from fxpasses.tuning.intervals import LOOKS, Interval
from fxpasses.tuning.tuning_ledger import Entry

Goal = Literal["time", "memory", "both"]
"""``time``: faster at any cost. ``memory``: lower peak at any cost. ``both``: one of them, neither worse."""

GOALS = ("time", "memory", "both")

_GAIN_THRESHOLD = 0.995
"""A step is kept if the whole interval of its ratio is below this."""

_HARM_THRESHOLD = 1.01
"""Ratios below this count as no worse."""


class Workbench(Protocol):
    """Compiles, measures and checks one graph. Programs are opaque to the search."""

    def proposals(self, choice: Choice) -> Sequence[tuple[Step, int]]:
        """Return the steps that would change the program of ``choice``, the most promising first.

        Each has the number of calls that it changes.
        """

    def compiled(self, choice: Choice) -> Any:
        """Compile the program of a choice. Any exception may propagate."""

    def duel(
        self, old: Any, new: Any, is_conclusive: Callable[[Interval], bool], min_pairs: int = LOOKS[0]
    ) -> Interval:
        """Measure two programs in turns and return the ratio of their times, new over old.

        Args:
            old: the program in the denominator.
            new: the program in the numerator.
            is_conclusive: whether an interval is narrow enough.
            min_pairs: how many pairs to measure even after the time is up.
        """

    def peak_bytes(self, program: Any) -> int:
        """Return the peak memory of one step of a program."""

    def refusal(self, choice: Choice, program: Any) -> tuple[str, str]:
        """Return why a program may not be used, or "", and what the checks say of it.

        Raises:
            OutOfTime: the checks take longer than the time left.
        """

    def seconds_left(self) -> float:
        """Return the seconds until the search has to end."""

    def expected_seconds(self, step: Step) -> float:
        """Estimate how long it takes to compile and measure the program with one more step."""

    def report_progress(self, what: str) -> None:
        """Report what is being done now."""


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        choice: the best choice that was measured and checked; the default if nothing is better.
        program: its program.
        entries: the ledger, with one entry for each step that was tried.
        ratio: the program's time over the default's, from a separate measurement; ``None`` for the default.
        memory: the same for peak memory, if it was measured.
        left: the steps that there was no time for.
        interrupted: whether the user stopped the search.
    """

    choice: Choice
    program: Any
    entries: list[Entry] = field(default_factory=list)
    ratio: Interval | None = None
    memory: float | None = None
    left: tuple[str, ...] = ()
    interrupted: bool = False


def search(bench: Workbench, graph: str, goal: Goal, default: Any) -> SearchResult:
    """Search for the best choice in the time available.

    Args:
        bench: compiles, measures and checks.
        graph: the digest of the graph, for the ledger.
        goal: what counts as better.
        default_result: the program of the default choice.
    """
    state = _Search(bench, graph, goal, default)
    try:
        state.run()
    except KeyboardInterrupt:
        state.result.interrupted = True
    try:
        return state.confirm()
    except KeyboardInterrupt:
        state.result.interrupted = True
        state.result.left = (*(step.name for step in state.result.choice.steps), *state.result.left)
        return state.default_result("interrupted")


class _Search:
    def __init__(self, bench: Workbench, graph: str, goal: Goal, default: Any) -> None:
        self._bench, self._graph, self._goal, self._default = bench, graph, goal, default
        self.result = SearchResult(Choice(), default)
        self._tried: set[str] = set()
        self._unproved_steps: list[str] = []
        self._peaks = {Choice(): bench.peak_bytes(default)} if goal != "time" else {}

    def run(self) -> None:
        """Try steps until none is left, or until the time is up."""
        while True:
            proposed = self._bench.proposals(self.result.choice)
            steps = [pair for pair in proposed if pair[0].name not in self._tried]
            self.result.left = tuple(step.name for step, _ in steps)
            seconds_left = self._bench.seconds_left()
            affordable = [pair for pair in steps if seconds_left >= self._bench.expected_seconds(pair[0])]
            if not affordable:
                return
            step, changed = affordable[0]
            self._tried.add(step.name)
            self._bench.report_progress(
                f"trying {step.name}, {len(steps) - 1} to go, best so far: {self.result.choice}"
            )
            entry = replace(self._attempt(step), changed=changed, predicted=step.predicted)
            self.result.entries.append(entry)
            self.result.left = tuple(step.name for step, _ in steps if step.name not in self._tried)
            if self._bench.seconds_left() <= 0:  # looking for the steps of another choice takes time as well
                return

    def _attempt(self, step: Step) -> Entry:
        entry = Entry(self._graph, step.name, "no gain", on=str(self.result.choice))
        choice = self.result.choice.plus(step)
        try:
            program = self._bench.compiled(choice)
            entry = self._measure(entry, choice, program)
            if entry.outcome != "kept":
                return entry
            reason, verdict = self._bench.refusal(choice, program)
        except OutOfTime:
            self._unproved_steps.append(step.name)
            return replace(entry, outcome="unproved", verdict="the checks take longer than the time left")
        except Exception as error:  # noqa: BLE001  (whatever fails in a candidate, the default still works)
            return replace(entry, outcome="failed", verdict=first_line(error))
        if reason:
            return replace(entry, outcome="wrong", verdict=reason)
        self.result.choice, self.result.program = choice, program
        return replace(entry, verdict=verdict)

    def _measure(self, entry: Entry, choice: Choice, program: Any) -> Entry:
        memory = None
        if self._goal != "time":
            self._peaks[choice] = self._bench.peak_bytes(program)
            memory = self._peaks[choice] / max(self._peaks[self.result.choice], 1)
            entry = replace(entry, memory=memory)
        time = self._bench.duel(self.result.program, program, _is_gain_decided)
        low, high = (time.low, time.high) if math.isfinite(time.high) else (None, None)
        entry = replace(entry, ratio=time.middle, low=low, high=high)
        return replace(entry, outcome=_outcome(self._goal, time, memory))

    def confirm(self) -> SearchResult:
        """Measure the winner against the default again: the best of many candidates is partly luck."""
        result = self.result
        result.left = (*self._unproved_steps, *result.left)
        if not result.choice.steps:
            return result
        self._bench.report_progress(f"measuring {result.choice} against the default")
        ratio = self._bench.duel(self._default, result.program, _is_harm_decided, min_pairs=LOOKS[1])
        result.ratio = ratio
        if self._goal != "time":
            result.memory = self._peaks[result.choice] / max(self._peaks[Choice()], 1)
        if _is_confirmed(self._goal, ratio, result.memory):
            return result
        return self.default_result(str(ratio))

    def default_result(self, measured: str) -> SearchResult:
        """Return the default. Args: what the winner gave against it in the end."""
        entries = [
            replace(e, outcome="no gain", verdict=f"against the default in the end: {measured}")
            if e.outcome == "kept"
            else e
            for e in self.result.entries
        ]
        return replace(
            self.result, choice=Choice(), program=self._default, entries=entries, ratio=None, memory=None
        )


def _outcome(goal: Goal, time: Interval, memory: float | None) -> Any:
    faster, slower = time.high < _GAIN_THRESHOLD, time.low > 1.0
    if goal == "time" or memory is None:
        return "kept" if faster else "loses" if slower else "no gain"
    smaller, larger = memory < _GAIN_THRESHOLD, memory > 1.0
    if goal == "memory":
        return "kept" if smaller else "loses" if larger else "no gain"
    if (faster and memory < _HARM_THRESHOLD) or (smaller and time.high < _HARM_THRESHOLD):
        return "kept"
    return "loses" if slower or larger else "no gain"


def _is_confirmed(goal: Goal, time: Interval, memory: float | None) -> bool:
    if goal == "memory":
        return memory is not None and memory < 1.0
    return time.high <= _HARM_THRESHOLD and (time.middle < 1.0 or (memory is not None and memory < 1.0))


def _is_gain_decided(interval: Interval) -> bool:
    """Whether the step clearly gains, or clearly gains too little to keep measuring."""
    return interval.high < _GAIN_THRESHOLD or interval.low > _GAIN_THRESHOLD


def _is_harm_decided(interval: Interval) -> bool:
    return interval.high < _HARM_THRESHOLD or interval.low > _HARM_THRESHOLD
