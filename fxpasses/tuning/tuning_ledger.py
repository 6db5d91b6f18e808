"""The ledger of tuning: what each step did to each graph, what it gained, and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table  # reading a ledger needs none

Outcome = Literal["kept", "no gain", "loses", "wrong", "failed", "struck", "unproved"]
"""The outcomes: kept in the tuned program; measured and no better; measured and worse; refused by a check;
not compiled or run; once kept, until the program failed; better, but the checks took longer than the time left.
"""

_REFUSED_OUTCOMES = ("wrong", "failed", "struck")
_OPTIONAL_FIELDS = ("ratio", "low", "high", "memory")


@dataclass(frozen=True)
class Entry:
    """One step that was tried on one graph.

    Attributes:
        graph: the digest of the graph's content.
        step: the name of the step.
        outcome: what became of it.
        predicted: the time with it over the time without, as the cost model predicts.
        ratio: the same, measured; ``None`` if it was not.
        low: the lower end of the interval of ``ratio``; ``None`` if too few pairs were measured for one.
        high: the upper end.
        memory: the peak memory with it over the peak memory without, if it was measured.
        changed: the number of calls that a pass added, changed or removed.
        verdict: what the checks say, or why it was refused.
        situation: the conditions of the measurement apart from versions: ``"training, 2 threads, time"`` and
            a digest of the options.
        on: the steps that it was added to and measured against.
    """

    graph: str
    step: str
    outcome: Outcome
    predicted: float = 1.0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    memory: float | None = None
    changed: int = 0
    verdict: str = ""
    situation: str = ""
    on: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Entry:
        """Read what :meth:`to_data` gave, ignoring unknown keys.

        Raises:
            TypeError: a value has another type.
        """
        numbers: dict[str, Any] = dict.fromkeys(("predicted", "ratio", "low", "high", "memory"), (int, float))
        types = {"changed": int, **numbers}
        values = {field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data}
        for name, value in values.items():
            if not isinstance(value, types.get(name, str)) and (
                value is not None or name not in _OPTIONAL_FIELDS
            ):
                raise TypeError(f"{name} is {value!r}")
        return cls(**values)

    @property
    def measured(self) -> str:
        """The ratio with its interval, as text."""
        if self.ratio is None:
            return ""
        ends = f" [{self.low:.2f}, {self.high:.2f}]" if self.low is not None else ""
        return f"{self.ratio:.2f}{ends}"


@dataclass(frozen=True)
class Change:
    """How a step did on a graph in two ledgers.

    Attributes:
        before: the entry of the other ledger, if it has one.
        after: the entry of this one.
    """

    before: Entry | None
    after: Entry | None

    @property
    def word(self) -> str:
        """``wins``, ``loses``, ``new``, ``gone`` or ``as before``.

        The first two need disjoint intervals, or a refusal in one ledger. If the step was added to different
        steps, these may be why it gains less. It then has to be kept in one ledger and lose in the other.
        """
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        a, b = self.before, self.after
        if (a.outcome in _REFUSED_OUTCOMES) != (b.outcome in _REFUSED_OUTCOMES):
            return "loses" if b.outcome in _REFUSED_OUTCOMES else "wins"
        if a.low is None or b.low is None or a.high is None or b.high is None:
            return "as before"
        if a.on != b.on and {a.outcome, b.outcome} != {"kept", "loses"}:
            return "as before"
        return "wins" if b.high < a.low else "loses" if b.low > a.high else "as before"


def changes(before: Iterable[Entry], after: Iterable[Entry]) -> list[Change]:
    """Compare two ledgers: what became of each step on each graph, in each situation."""
    old = {(e.graph, e.situation, e.step): e for e in before}
    new = {(e.graph, e.situation, e.step): e for e in after}
    return [Change(old.get(key), new.get(key)) for key in dict.fromkeys((*old, *new))]


def table_of_entries(entries: Sequence[Entry], title: str = "") -> Table:
    """Return the ledger as a table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", title=title or None, title_justify="left")
    shows_situation = len({e.situation for e in entries}) > 1
    situation = ["in"] if shows_situation else []
    for name in ("graph", *situation, "step", "outcome", "predicted", "time", "memory", "calls", "verdict"):
        table.add_column(
            name, justify="right" if name in ("predicted", "time", "memory", "calls") else "left"
        )
    for e in entries:
        memory = "" if e.memory is None else f"{e.memory:.2f}"
        changed = str(e.changed) if e.changed else ""
        situation = [e.situation] if shows_situation else []
        predicted = f"{e.predicted:.2f}"
        table.add_row(
            e.graph[:8], *situation, e.step, e.outcome, predicted, e.measured, memory, changed, e.verdict
        )
    return table


def table_of_changes(found: Sequence[Change]) -> Table:
    """Return the comparison of two ledgers as a table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("graph", "step", "in", "before", "now", ""):
        table.add_column(name)
    for change in found:
        entry = change.after or change.before
        assert entry is not None
        cells = [f"{e.outcome} {e.measured}".strip() if e else "" for e in (change.before, change.after)]
        table.add_row(entry.graph[:8], entry.step, entry.situation, *cells, change.word)
    return table
