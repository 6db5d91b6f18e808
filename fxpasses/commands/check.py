"""Compare the results and gradients of a model in eager, after each stage of the compilation, and compiled.
Exits with 1 if a stage is wrong."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from fxpasses.commands.named import model_named
from fxpasses.commands.outcome import Outcome, plain_data, show_progress

HELP = "compare a model in eager, after each stage, and compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model and how to compile it."""
    parser.add_argument(
        "model",
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function returns a model and a tuple of inputs",
    )
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--dynamic", action="store_true", help="compile with symbolic sizes")
    parser.add_argument("--no-backward", action="store_true", help="do not compare gradients")
    parser.add_argument(
        "--seconds", type=float, help="time limit for trying passes on made-up inputs (default: no limit)"
    )
    parser.add_argument(
        "--option",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, such as regions=always or memory_budget=0.5; repeatable",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Make the model and check it. The table is printed at the end."""
    model, inputs = model_named(arguments.model)
    with show_progress("importing torch"):
        from fxpasses.checking.model import check
    result = check(
        model,
        inputs,
        options={"compiler": arguments.compiler, **dict(arguments.option)},
        dynamic=arguments.dynamic or None,
        backward=not arguments.no_backward,
        seconds=arguments.seconds,
    )
    return Outcome(0 if result.ok else 1, {"ok": result.ok, **plain_data(result)})


def _option(text: str) -> tuple[str, Any]:
    """Parse ``regions=always`` into a name and a value: a Python literal, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
