"""Count verdicts, print them, and read and write them as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.conformance.compare import Outcome, Verdict

__all__ = ["Case", "Tally"]


@dataclass(frozen=True)
class Case:
    """One comparison."""

    label: str
    table: str
    layout: str
    symbolic: bool
    outcome: Outcome

    @property
    def group(self) -> tuple[str, str, str]:
        return ("symbolic" if self.symbolic else "static", self.layout, self.table)


@dataclass
class Tally:
    """Counts of verdicts by group (sizes, layout, table), and every case whose verdict is not ``OK``."""

    counts: dict[tuple[str, str, str], Counter[Verdict]] = field(default_factory=dict)
    notable: list[Case] = field(default_factory=list)

    def add(self, case: Case) -> None:
        self.counts.setdefault(case.group, Counter())[case.outcome.verdict] += 1
        if case.outcome.verdict is not Verdict.OK:
            self.notable.append(case)

    def merge(self, other: Tally) -> None:
        for group, counter in other.counts.items():
            self.counts.setdefault(group, Counter()).update(counter)
        self.notable.extend(other.notable)

    def count(self, *verdicts: Verdict) -> int:
        """Return the number of cases with one of ``verdicts``."""
        return sum(counter[v] for counter in self.counts.values() for v in verdicts)

    def with_verdict(self, *verdicts: Verdict) -> list[Case]:
        """Return the notable cases with one of ``verdicts``."""
        return [case for case in self.notable if case.outcome.verdict in verdicts]

    def print(self, console: Console, *, details: Iterable[Verdict] = (), title: str = "") -> None:
        """Print the table of counts, then each case with a verdict in ``details``."""
        table = Table(title=title or None)
        for heading in ("sizes", "layout", "table"):
            table.add_column(heading)
        for heading in ("cases", *Verdict):
            table.add_column(str(heading), justify="right")
        for group, counter in sorted(self.counts.items()):
            table.add_row(*group, str(sum(counter.values())), *(str(counter[v]) for v in Verdict))
        total: Counter[Verdict] = sum(self.counts.values(), Counter())
        table.add_row("all", "", "", str(sum(total.values())), *(str(total[v]) for v in Verdict))
        console.print(table)
        for case in self.with_verdict(*details):
            where = ", ".join(case.group)
            console.print(f"{case.outcome.verdict}: {case.label} ({where})", highlight=False, markup=False)
            console.print(f"    {case.outcome.detail}", highlight=False, markup=False)

    def to_json(self) -> dict[str, Any]:
        """Return the whole tally as plain data."""
        return {
            "counts": [
                {"group": list(group), **{str(v): counter[v] for v in Verdict}}
                for group, counter in sorted(self.counts.items())
            ],
            "notable": [
                {
                    "case": case.label,
                    "table": case.table,
                    "layout": case.layout,
                    "symbolic": case.symbolic,
                    "verdict": str(case.outcome.verdict),
                    "detail": case.outcome.detail,
                }
                for case in self.notable
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tally:
        tally = cls()
        for row in data["counts"]:
            sizes, layout, table = row["group"]
            tally.counts[(sizes, layout, table)] = Counter({v: row[str(v)] for v in Verdict})
        for row in data["notable"]:
            outcome = Outcome(Verdict(row["verdict"]), row["detail"])
            tally.notable.append(Case(row["case"], row["table"], row["layout"], row["symbolic"], outcome))
        return tally

    @classmethod
    def read(cls, path: Path) -> Tally:
        return cls.from_json(json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
