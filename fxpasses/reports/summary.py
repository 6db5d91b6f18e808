"""A short summary of a report, for a terminal or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fake.notebook import as_html

_COLUMNS = (
    "graph",
    "nodes",
    "seconds",
    "saved for backward",
    "runs in eager:",
    "ends with a graph break",
    "compiled again for",
)


@dataclass(frozen=True)
class Summary:
    """A summary of what was compiled. Prints as text.

    Attributes:
        data: the whole report (see :func:`fxpasses.reports.page.read_report`).
    """

    data: dict[str, Any]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row per graph: name, nodes, seconds, saved bytes, why eager, where it ends, why recompiled."""
        return [_row(graph) for graph in self.data["graphs"]]

    @property
    def advice(self) -> list[str]:
        """The most useful changes to make, each with its place."""
        return [
            f"{number}. {item['title']}: {item['do']}" + (f" ({item['source']})" if item["source"] else "")
            for number, item in enumerate(self.data["advice"], 1)
        ]

    def __str__(self) -> str:
        lines = [
            "; ".join(f"{name} {value}" for name, value in zip(_COLUMNS, row, strict=True) if value)
            for row in self.rows
        ]
        return "\n".join([*lines, *self.advice])

    def _repr_html_(self) -> str:
        return as_html("\n".join(self.advice), _COLUMNS, self.rows)


def _row(graph: dict[str, Any]) -> tuple[str, ...]:
    nodes = ", ".join(
        f"{kind} {len(one['nodes'])}" for kind, one in graph["graphs"].items() if kind != "joint"
    )
    graph_break, recompilation, partition = graph["ended"], graph["recompiled"], graph["partition"]
    where = graph_break["where"] if graph_break else None
    return (
        graph["name"].removeprefix("graph_"),
        nodes,
        f"{sum(graph['seconds']['stages'].values()):.1f}",
        f"{partition['saved_bytes']:,} bytes" if partition else "",
        "; ".join(f"{failed['stage']} failed, {failed['reason']}" for failed in graph["fallbacks"]),
        f"at {where['file']}:{where['line']}: {where['code']}"
        if where
        else graph_break["reason"]
        if graph_break
        else "",
        ("; ".join(recompilation["differs"]) or recompilation["reason"] or "another guard")
        if recompilation
        else "",
    )
