"""Run a script again and again, each time with a compilation that ends elsewhere, until the guilty stage, pass and match
site (or operator that Inductor lowers) are found. The script fails when it exits with another status than 0: an exception, a
failed assertion, sys.exit(1). Goes on where a killed search ended. Exits with 1 when the compilation is at fault."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError, positive, working

HELP = "find the stage, pass and match site that make a script fail"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the script and the options of the search."""
    parser.add_argument(
        "--output", default="fxpasses_bisect", metavar="DIR", help="for the state and the repro file"
    )
    parser.add_argument("--state", metavar="FILE", help="where answers are kept (default DIR/state.json)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="after which a run counts as failed")
    parser.add_argument(
        "--confirm",
        type=positive,
        default=3,
        metavar="N",
        help="how many runs with what is found guilty, and without, have to agree before that is believed (default 3)",
    )
    parser.add_argument("script", help="the script; what follows are its arguments")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> Outcome:
    """Run the search."""
    for option in ("--output", "--state", "--timeout", "--confirm", "--json", "--debug"):
        if any(word == option or word.startswith(option + "=") for word in arguments.args):
            print(
                f"{option} comes after the script and is handed to it; options of bisect go before the script",
                file=sys.stderr,
            )
    script = Path(arguments.script)
    if script.is_file():
        try:
            compile(script.read_bytes(), str(script), "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{str(script)!r} is not Python: {error}") from error
    with working("importing torch"):
        from fxpasses.checking.bisection import bisect_script
    verdict = bisect_script(
        arguments.script,
        arguments.args,
        state=arguments.state,
        output=arguments.output,
        timeout=arguments.timeout,
        confirm=arguments.confirm,
    )
    return Outcome(1 if verdict.stage else 0, verdict, lambda: print(verdict.text))
