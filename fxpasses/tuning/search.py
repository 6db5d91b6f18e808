"""The search: one step after the other, the most promising first; each is kept only if it is measured better and proved equal.

The search knows nothing of graphs and compilers: what it asks for is a :class:`Workbench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from fake.error_text import first_line
from fxpasses.tuning.choice import Choice, Step
from fxpasses.tuning.intervals import LOOKS, Interval
from fxpasses.tuning.tuning_ledger import Entry

Goal = Literal["time", "memory", "both"]
"""``time``: faster, whatever it takes. ``memory``: a lower peak, whatever it takes. ``both``: one of them, and not at the other's expense."""

GOALS = ("time", "memory", "both")

_GAIN = 0.995
"""A step is kept if the whole interval of its ratio is below this."""

_HARM = 1.01
"""What counts as no worse."""


class Workbench(Protocol):
    """Compiles, measures and checks one graph. Programs are whatever it makes them."""

    def proposals(self, choice: Choice) -> Sequence[tuple[Step, int]]:
        """The steps that would change the program of ``choice``, the most promising first, with the number of calls that each changes."""

    def compiled(self, choice: Choice) -> Any:
        """The program of a choice. Raises whatever goes wrong."""

    def duel(
        self, old: Any, new: Any, settled: Callable[[Interval], bool], least: int = LOOKS[0]
    ) -> Interval:
        """The time of one program over that of another, measured in turns.

        Args:
            old: the program that the time is divided by.
            new: the other one.
            settled: whether an interval is narrow enough.
            least: how many pairs are measured even when the time is up.
        """

    def peak_bytes(self, program: Any) -> int:
        """The most memory that one step of a program takes."""

    def refusal(self, choice: Choice, program: Any) -> tuple[str, str]:
        """Why a program may not be used, or "", and what the checks say of it."""

    def seconds_left(self) -> float:
        """Until the search has to be over."""

    def expected_seconds(self, step: Step) -> float:
        """How long compiling and measuring the program of one more step takes, as far as is known."""

    def tell(self, what: str) -> None:
        """Say what is done now."""


@dataclass
class Found:
    """What a search found.

    Attributes:
        choice: the best that was measured and checked; the default if nothing is better.
        program: its program.
        entries: the ledger, one entry a step that was tried.
        ratio: time of the program over the default's, from measurements of their own; ``None`` for the default.
        memory: the same for peak memory, where it was measured.
        left: the steps that there was no time for.
        interrupted: whether the search was stopped by the user.
    """

    choice: Choice
    program: Any
    entries: list[Entry] = field(default_factory=list)
    ratio: Interval | None = None
    memory: float | None = None
    left: tuple[str, ...] = ()
    interrupted: bool = False


def search(bench: Workbench, graph: str, goal: Goal, default: Any) -> Found:
    """Look for the best choice in the time that there is.

    Args:
        bench: compiles, measures and checks.
        graph: the digest of the graph, for the ledger.
        goal: what is better.
        default: the program of the default choice.
    """
    state = _Search(bench, graph, goal, default)
    try:
        state.run()
    except KeyboardInterrupt:
        state.found.interrupted = True
    return state.confirmed()


class _Search:
    def __init__(self, bench: Workbench, graph: str, goal: Goal, default: Any) -> None:
        self._bench, self._graph, self._goal, self._default = bench, graph, goal, default
        self.found = Found(Choice(), default)
        self._tried: set[str] = set()
        self._peaks = {Choice(): bench.peak_bytes(default)} if goal != "time" else {}

    def run(self) -> None:
        """Try the steps until none is left, or no time."""
        while True:
            proposed = self._bench.proposals(self.found.choice)
            steps = [pair for pair in proposed if pair[0].name not in self._tried]
            self.found.left = tuple(step.name for step, _ in steps)
            left = self._bench.seconds_left()
            fitting = [pair for pair in steps if left >= self._bench.expected_seconds(pair[0])]
            if not fitting:
                return
            step, changed = fitting[0]
            self._tried.add(step.name)
            self._bench.tell(f"trying {step.name}, {len(steps) - 1} to go, best so far: {self.found.choice}")
            entry = replace(self._attempt(step), changed=changed, predicted=step.predicted)
            self.found.entries.append(entry)

    def _attempt(self, step: Step) -> Entry:
        entry = Entry(self._graph, step.name, "no gain", on=str(self.found.choice))
        choice = self.found.choice.plus(step)
        try:
            program = self._bench.compiled(choice)
            entry = self._measured(entry, choice, program)
            if entry.outcome != "kept":
                return entry
            refused, verdict = self._bench.refusal(choice, program)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with a candidate, the default is there)
            return replace(entry, outcome="failed", verdict=first_line(error))
        if refused:
            return replace(entry, outcome="wrong", verdict=refused)
        self.found.choice, self.found.program = choice, program
        return replace(entry, verdict=verdict)

    def _measured(self, entry: Entry, choice: Choice, program: Any) -> Entry:
        memory = None
        if self._goal != "time":
            self._peaks[choice] = self._bench.peak_bytes(program)
            memory = self._peaks[choice] / max(self._peaks[self.found.choice], 1)
            entry = replace(entry, memory=memory)
        faster = self._bench.duel(self.found.program, program, _settled)
        low, high = (faster.low, faster.high) if math.isfinite(faster.high) else (None, None)
        entry = replace(entry, ratio=faster.middle, low=low, high=high)
        return replace(entry, outcome=_outcome(self._goal, faster, memory))

    def confirmed(self) -> Found:
        """What was found, measured against the default once more: the best of many is partly luck."""
        found = self.found
        if not found.choice.steps:
            return found
        self._bench.tell(f"measuring {found.choice} against the default")
        ratio = self._bench.duel(self._default, found.program, _settled_as_no_worse, least=LOOKS[-2])
        found.ratio = ratio
        if self._goal != "time":
            found.memory = self._peaks[found.choice] / max(self._peaks[Choice()], 1)
        if _holds(self._goal, ratio, found.memory):
            return found
        entries = [
            replace(e, outcome="no gain", verdict=f"against the default in the end: {ratio}")
            if e.outcome == "kept"
            else e
            for e in found.entries
        ]
        return replace(
            found, choice=Choice(), program=self._default, entries=entries, ratio=None, memory=None
        )


def _outcome(goal: Goal, time: Interval, memory: float | None) -> Any:
    faster, slower = time.high < _GAIN, time.low > 1.0
    if goal == "time" or memory is None:
        return "kept" if faster else "loses" if slower else "no gain"
    smaller, larger = memory < _GAIN, memory > 1.0
    if goal == "memory":
        return "kept" if smaller else "loses" if larger else "no gain"
    if (faster and memory < _HARM) or (smaller and time.high < _HARM):
        return "kept"
    return "loses" if slower or larger else "no gain"


def _holds(goal: Goal, time: Interval, memory: float | None) -> bool:
    if goal == "memory":
        return memory is not None and memory < 1.0
    return time.high <= _HARM and (time.middle < 1.0 or (memory is not None and memory < 1.0))


def _settled(found: Interval) -> bool:
    """Whether it is clear that a step gains, or that it gains too little to ask further."""
    return found.high < _GAIN or found.low > _GAIN


def _settled_as_no_worse(found: Interval) -> bool:
    return found.high < _HARM or found.low > _HARM
