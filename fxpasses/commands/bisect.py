"""Find the stage, pass and match site (or operator that Inductor lowers) that make a script fail. Runs the
script repeatedly, and ends the compilation at a different point each time. A run fails if its exit status is
not 0: an exception, a failed assertion, sys.exit(1). Resumes a search that was killed. Exits with 1 if the
compilation is at fault."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError, positive, show_progress

HELP = "find the stage, pass and match site that make a script fail"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the script and the options of the search."""
    parser.add_argument(
        "--output",
        default="fxpasses_bisect",
        metavar="DIR",
        help="directory for the state and the repro file (default fxpasses_bisect)",
    )
    parser.add_argument(
        "--state", metavar="FILE", help="file that records the results of runs (default DIR/state.json)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="a run that takes longer counts as failed"
    )
    parser.add_argument(
        "--confirm",
        type=positive,
        default=3,
        metavar="N",
        help="how many runs with the guilty part, and as many without it, must confirm it (default 3)",
    )
    parser.add_argument("script", help="the script; everything after it is passed to the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> Outcome:
    """Run the search."""
    for option in ("--output", "--state", "--timeout", "--confirm", "--json", "--debug"):
        if any(word == option or word.startswith(option + "=") for word in arguments.args):
            print(
                f"{option} comes after the script and is passed to it; options of bisect go before it",
                file=sys.stderr,
            )
    script = Path(arguments.script)
    if script.is_file():
        try:
            compile(script.read_bytes(), str(script), "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{str(script)!r} is not Python: {error}") from error
    with show_progress("importing torch"):
        from fxpasses.checking.bisecting.bisection import bisect_script
    verdict = bisect_script(
        arguments.script,
        arguments.args,
        state=arguments.state,
        output=arguments.output,
        timeout=arguments.timeout,
        confirm=arguments.confirm,
    )
    return Outcome(1 if verdict.stage else 0, verdict, lambda: print(verdict.text))
