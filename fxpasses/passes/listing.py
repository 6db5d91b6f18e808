"""``python -m fxpasses passes``: the passes that can be asked for by name, with their contracts and options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from rich.console import Console
from rich.table import Table

from fxpasses.pass_manager.contract import GRAPH_KINDS, Pass, option_fields
from fxpasses.pass_manager.specification import parse_pass, split_pipeline
from fxpasses.passes.registry import available_passes

__all__ = ["list_passes"]


def list_passes(names: str | None, console: Console | None = None) -> int:
    """Print a table of all available passes, or all about some of them; returns the exit status.

    Args:
        names: passes as text, separated by commas (``"fold_constants{max_bytes=16},eliminate_dead_code"``), or ``None`` for all.
        console: where to print.

    Raises:
        OptionsError: for an unknown name or option.
    """
    console = console or Console()
    available = available_passes()
    if names is None:
        table = Table(box=None, header_style="bold")
        for heading in ("pass", "graphs", "numerics", "options", "what it does"):
            table.add_column(heading, overflow="fold")
        for name in available:
            item = available[name]
            table.add_row(name, _graphs(item), _contract(item).numerics, _options(item), _summary(item))
        console.print(table)
        return 0
    for text in split_pipeline(names):
        item = parse_pass(text, available)
        console.print(f"[bold]{item}[/bold]", highlight=False)
        for field in dataclasses.fields(_contract(item)):
            value = getattr(_contract(item), field.name)
            described = value if isinstance(value, str) else ", ".join(sorted(value))
            if described:
                console.print(f"  {field.name}: {described}", highlight=False)
        documented = getattr(item, "function", type(item))
        console.print(inspect.getdoc(documented) or "", markup=False, highlight=False)
    return 0


def _contract(item: Any) -> Any:
    return (
        item.contract
        if isinstance(item, Pass) or not isinstance(item.contract, property)
        else item().contract
    )


def _graphs(item: Any) -> str:
    graphs = _contract(item).graphs
    return (
        "any"
        if set(graphs) == set(GRAPH_KINDS)
        else ", ".join(kind for kind in GRAPH_KINDS if kind in graphs)
    )


def _options(item: Any) -> str:
    values = vars(item) if isinstance(item, Pass) else {}
    return " ".join(f"{f.name}={values.get(f.name, f.default)!r}" for f in option_fields(item))


def _summary(item: Any) -> str:
    documented = getattr(item, "function", None) or getattr(item, "pattern", None) or item
    return (inspect.getdoc(documented) or "").partition("\n")[0]
