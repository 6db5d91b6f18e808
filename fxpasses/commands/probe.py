"""Derive an operator's fake kernel from its real one. Exits with 1 if the samples do not determine it."""

from __future__ import annotations

import argparse

from fxpasses.commands.named import add_operator, read_operator
from fxpasses.commands.outcome import Outcome, UsageError, positive, show_progress

HELP = "derive the fake kernel of a custom operator from sample calls"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the operator, its samples and the budget."""
    add_operator(parser)
    parser.add_argument(
        "--budget", type=positive, default=90, help="kernel calls to spend on each sample (default 90)"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Derive the fake kernel and print its source."""
    with show_progress("importing torch") as tell:
        from fake.library.errors import ProbeError
        from fake.library.probe.run_probe import probe

        op, samples = read_operator(arguments)
        tell("calling the operator")
        try:
            rule = probe(op, samples, budget=arguments.budget)
        except ProbeError as error:
            raise UsageError(str(error)) from error
    questions, crashes = list(map(str, rule.open_questions)), list(map(str, rule.crashes))

    def show() -> None:
        remarks = [
            *(f"open question: {text}" for text in questions),
            *(f"not covered: {text}" for text in crashes),
        ]
        print(rule, *("# " + text.replace("\n", "\n# ") for text in remarks), sep="\n")

    data = {"source": str(rule), "decided": rule.decided, "open_questions": questions, "not_covered": crashes}
    return Outcome(0 if rule.decided else 1, data, show)
