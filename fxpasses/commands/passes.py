"""List the passes that can be selected by name, with contracts and options, or describe some in full."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from fxpasses.commands.outcome import Outcome, UsageError, console, plain_data, show_progress

HELP = "list the passes that can be selected by name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the names of passes."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="describe these in full: 'fold_constants{max_bytes=16}' eliminate_dead_code (or with commas)",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """List all passes, or describe the named ones."""
    if not all(name.strip(" ,") for name in arguments.names):
        raise UsageError("no pass is named; omit the names to list all passes")
    with show_progress("importing torch"):
        from fxpasses.pass_manager.specification import parse_pass, split_pipeline
        from fxpasses.passes.registry import available_passes
    available = available_passes()
    if not arguments.names:
        return Outcome(0, [_pass_data(n, p) for n, p in available.items()], lambda: _show_list(available))
    chosen = [parse_pass(text, available) for text in split_pipeline(",".join(arguments.names))]
    return Outcome(0, [_pass_data(str(item), item) for item in chosen], lambda: _show_each(chosen))


def _pass_data(name: str, item: Any) -> dict[str, Any]:
    documented = _documented(item)
    return {
        "name": name,
        "options": {key: plain_data(value) for key, value in _options(item).items()},
        **plain_data(_contract(item)),
        "documentation": inspect.getdoc(documented) or "",
    }


def _show_list(available: Mapping[str, Any]) -> None:
    """Print two lines per pass, so that its name and options stay whole on narrow screens and in ``grep``."""
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    for name, item in available.items():
        options = "".join(f" {key}={value!r}" for key, value in _options(item).items())
        summary = (inspect.getdoc(_documented(item)) or "").partition("\n")[0].replace("``", "`")
        out.print(Text.assemble((name, "bold"), options), soft_wrap=True)
        out.print(Padding(Text(f"{summary} ({_graphs(item)}; {_contract(item).numerics})"), (0, 0, 0, 4)))


def _show_each(chosen: list[Any]) -> None:
    out = console()
    for item in chosen:
        out.print(str(item), style="bold", markup=False, highlight=False)
        for field in dataclasses.fields(_contract(item)):
            value = getattr(_contract(item), field.name)
            text = value if isinstance(value, str) else ", ".join(sorted(value))
            if text:
                out.print(f"  {field.name}: {text}", markup=False, highlight=False)
        print(_without_markup(inspect.getdoc(_documented(item)) or ""))


def _without_markup(text: str) -> str:
    """Return a docstring without its markup."""
    return re.sub(r"::$", ":", text.replace("``", "`"), flags=re.MULTILINE)


def _contract(item: Any) -> Any:
    from fxpasses.pass_manager.pass_base import Pass

    return (
        item.contract
        if isinstance(item, Pass) or not isinstance(item.contract, property)
        else item().contract
    )


def _graphs(item: Any) -> str:
    from fxpasses.pass_manager.pass_base import GRAPH_KINDS

    graphs = _contract(item).graphs
    return "any" if set(graphs) == set(GRAPH_KINDS) else ", ".join(k for k in GRAPH_KINDS if k in graphs)


def _options(item: Any) -> dict[str, Any]:
    from fxpasses.pass_manager.pass_base import Pass, option_fields

    values = vars(item) if isinstance(item, Pass) else {}
    return {field.name: values.get(field.name, field.default) for field in option_fields(item)}


def _documented(item: Any) -> Any:
    found = getattr(item, "function", None) or getattr(item, "pattern", None) or item
    return found if callable(found) or isinstance(found, type) else type(found)
