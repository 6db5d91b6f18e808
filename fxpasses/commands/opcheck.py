"""Check a custom operator's registrations on sample calls. Exits with 1 if a check fails."""

from __future__ import annotations

import argparse
from typing import Any

from fxpasses.commands.named import add_operator, read_operator
from fxpasses.commands.outcome import Outcome, UsageError, plain_data, show_progress

HELP = "check a custom operator's registrations on sample calls"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the operator, its samples and the checks."""
    add_operator(parser)
    parser.add_argument("--check", action="append", metavar="NAME", help="run only this check; repeatable")
    parser.add_argument(
        "--all", action="store_true", help="report every check (default: torch's four, and others that fail)"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Check each sample."""
    with show_progress("importing torch") as tell:
        from fake.library.opcheck.runner import ALL_TEST_UTILS, opcheck
        from fxpasses.errors import did_you_mean

        for name in arguments.check or ():
            if name not in ALL_TEST_UTILS:
                known = ", ".join(ALL_TEST_UTILS)
                raise UsageError(
                    f"--check: there is no check {name!r}{did_you_mean(name, ALL_TEST_UTILS)}"
                    f"; the checks are {known}"
                )
        op, samples = read_operator(arguments)
        verdicts = []
        checks = arguments.check or ("ALL" if arguments.all else None)
        for number, (args, kwargs) in enumerate(samples):
            tell("checking samples", number, len(samples))
            verdicts.append(opcheck(op, args, kwargs, test_utils=checks, raise_exception=False))
    passed = sum(verdict.ok for verdict in verdicts)

    def show() -> None:
        for number, verdict in enumerate(verdicts):
            print(f"sample {number}: {verdict}")
        print(f"{passed} of {len(samples)} samples passed")

    data = [
        {
            "sample": n,
            "ok": v.ok,
            "op": v.op,
            "checks": {name: _result_data(result) for name, result in v.items()},
        }
        for n, v in enumerate(verdicts)
    ]
    return Outcome(int(passed < len(samples)), data, show)


def _result_data(result: Any) -> dict[str, Any]:
    if isinstance(result, str):
        return {"ok": True, "note": getattr(result, "note", "")}
    evidence = plain_data(result.evidence)
    return {"ok": False, "problem": result.problem, "evidence": evidence, "fix": result.fix}
