"""Graphs, passes and compilers between eager PyTorch and Inductor.

exit status:
  0    no problem was found
  1    a problem was found, for example: a check failed, the demo disagrees
       with eager, the compilation is at fault, the samples do not determine a
       fake kernel, a file is damaged, a step does worse than in another ledger
  2    the command line is wrong
  3    your program or fxpasses raised an exception
  130  interrupted
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import fxpasses
from fake.error_text import describe_error
from fxpasses.commands import (
    bisect,
    cache,
    check,
    demo,
    doctor,
    inspect,
    ledger,
    opcheck,
    passes,
    probe,
    prove,
    report,
    simulation,
)
from fxpasses.commands.outcome import Command, Outcome, UsageError, discard_stdout, plain_data
from fxpasses.errors import BisectError, OptionsError, ReportError, did_you_mean

COMMANDS: dict[str, Command] = {
    "demo": demo,
    "doctor": doctor,
    "report": report,
    "inspect": inspect,
    "check": check,
    "bisect": bisect,
    "passes": passes,
    "prove": prove,
    "opcheck": opcheck,
    "probe": probe,
    "ledger": ledger,
    "simulate": simulation,
    "cache": cache,
}
SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")
_USER_ERRORS = (UsageError, OptionsError, BisectError, ReportError)
"""Exceptions for a user's mistakes, which are reported in one line.

An ``OSError`` about a file is one as well, unless the user's code opened the file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status, as ``fxpasses --help`` lists them.

    Raises:
        SystemExit: with 2 for a command line that is wrong, with 0 after ``--help`` and ``--version``.
    """
    arguments = make_parser().parse_args(argv)
    parser: argparse.ArgumentParser = arguments.parser
    for name, value in vars(arguments).items():
        if value == "":
            parser.error(f"argument {name}: expected a name, got ''")
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            outcome = arguments.run(arguments)
        if arguments.json:
            print(json.dumps(plain_data(outcome.data), indent=2))
        else:
            outcome.show()
        print(end="", flush=True)  # print() accepts a closed standard output, which is None
        return outcome.status
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        discard_stdout()
        return 0
    except _USER_ERRORS as error:
        if arguments.debug:
            raise
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich turns it into a SystemExit
            discard_stdout()
            return 0
        if arguments.debug:
            raise
        if isinstance(error, OSError) and error.filename is not None and not _user_code_line(error):
            print(f"{parser.prog}: error: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        print(_error_text(parser.prog, error), file=sys.stderr)
        return 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with status 2. For an invalid choice, suggest the nearest valid one."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        near = did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        super().error(message + near)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="fxpasses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.HELP, description=command.__doc__, allow_abbrev=False)
        command.add_arguments(added)
        added.add_argument("--json", action="store_true", help="print the result as JSON")
        added.add_argument("--debug", action="store_true", help="show the full traceback of an error")
        added.set_defaults(run=command.run, parser=added)
    completion = commands.add_parser(
        "completion",
        help="print the completion script for a shell",
        allow_abbrev=False,
        description='For bash, run: eval "$(fxpasses completion bash)". '
        "For another shell, see its documentation on where to keep such scripts.",
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion, parser=completion, json=False, debug=False)
    return parser


def _versions() -> str:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"fxpasses {fxpasses.__version__} (torch {torch}, Python {sys.version.split()[0]})"


def _completion(arguments: argparse.Namespace) -> Outcome:
    import shtab

    return Outcome(0, None, lambda: print(shtab.complete(make_parser(), arguments.shell)))


def _error_text(prog: str, error: BaseException) -> str:
    """Return an exception in a few lines: the error, where in the user's files it arose, and its notes."""
    text = describe_error(error)
    notes = getattr(error, "__notes__", [])
    where = [line] if (line := _user_code_line(error)) else []
    return "\n".join([f"{prog}: {text}", *where, *notes, "(use --debug to show the traceback)"])


def _user_code_line(error: BaseException) -> str:
    """Return the innermost line of the user's files in an exception's traceback, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f'  File "{error.filename}", line {error.lineno}: {(error.text or "").strip()}'
    packages = Path(__file__).parents[2]
    others = [str(packages / name) for name in ("fxpasses", "fake", "compiled_autograd")]
    others = [folder + os.sep for folder in (*others, os.path.dirname(os.__file__))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*others, "<")) and "site-packages" not in frame.filename:
            return f'  File "{frame.filename}", line {frame.lineno}: {frame.line}'
    return ""
