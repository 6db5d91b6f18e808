"""Prove in exact arithmetic that a pass preserves the functions that graphs compute: on programs of many
kinds, dtypes, sizes and strides, or on a model. Exits with 1 if a rewrite is wrong or cannot be proved."""

from __future__ import annotations

import argparse
from typing import Any

from fxpasses.commands.named import model_named, object_named
from fxpasses.commands.outcome import Outcome, UsageError, plain_data, show_progress

HELP = "prove at each match site that a pass is correct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the pass and what to run it on."""
    parser.add_argument(
        "passed",
        metavar="PASS",
        help="MODULE:NAME or FILE.py:NAME of a pass, or a name from 'fxpasses passes', with any options",
    )
    parser.add_argument(
        "--model",
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function returns a model and a tuple of inputs",
    )
    parser.add_argument("--dynamic", action="store_true", help="capture the model with symbolic sizes")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")


def run(arguments: argparse.Namespace) -> Outcome:
    """Find the pass and prove it."""
    with show_progress("importing torch"):
        from fxpasses.pass_manager.pass_base import Pass
        from fxpasses.pass_manager.specification import parse_pass
        from fxpasses.passes.registry import available_passes
        from fxpasses.testing import NoSiteError, prove
    if ":" in arguments.passed:
        found = object_named(arguments.passed, "pass")
        item = found() if isinstance(found, type) else found
    else:
        item = parse_pass(arguments.passed, available_passes())
    if not isinstance(item, Pass):
        raise UsageError(
            f"{arguments.passed!r} is a {type(item).__name__}, not a pass: see fxpasses.graph_pass"
        )
    given: tuple[Any, ...] = ()
    if arguments.model:
        model, inputs = model_named(arguments.model)
        given = (model, *inputs)
    try:
        with show_progress(f"proving {arguments.passed}"):
            proof = prove(item, *given, dynamic=arguments.dynamic or None)
    except NoSiteError as error:
        raise UsageError(str(error)) from error
    data = {
        "ok": proof.ok,
        "name": proof.name,
        "conditions": proof.conditions,
        "sites": [
            {"program": s.program, "setting": s.setting, "graph": s.graph, "site": s.site, "verdict": s.said}
            for s in proof.sites
        ],
    }

    def show() -> None:
        print(proof.table() if arguments.table else proof)
        for condition in proof.conditions:
            print(f"  {condition}")

    return Outcome(0 if proof.ok else 1, plain_data(data), show)
