"""The command line: ``python -m fxpasses COMMAND``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake.library.opcheck.cli import main as opcheck
from fake.library.probe.cli import main as probe
from fxpasses.checking.bisect import bisect_script
from fxpasses.checking.model import check
from fxpasses.demo import DemoSettings
from fxpasses.demo.show import run_demo
from fxpasses.doctor.cli import main as doctor
from fxpasses.errors import BisectError, OptionsError
from fxpasses.passes.listing import list_passes

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fxpasses", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bisect(commands)
    _add_check(commands)
    _add_passes(commands)
    for name, run, text in _COMMANDS:
        command = commands.add_parser(name, help=text, add_help=False)
        command.set_defaults(run=lambda _, rest, run=run: run(rest))
    arguments, rest = parser.parse_known_args(argv)
    return arguments.run(arguments, rest)


_COMMANDS = (
    ("doctor", doctor, "tell what is in force with this torch and compiler, what is not, and why"),
    ("opcheck", opcheck, "check a custom operator's registrations on sample calls"),
    ("probe", probe, "derive the fake kernel of a custom operator from sample calls"),
)
"""Commands that parse their own arguments."""


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small GPT through the backend, next to eager and Inductor, and compare",
        description="Train a small GPT on the standard library's source, with the same steps in eager, "
        "fxpasses and Inductor. Exits with 1 when fxpasses disagrees with eager.",
    )
    defaults = DemoSettings()
    for name, kind, text in (
        ("steps", int, "training steps"),
        ("layers", int, "blocks of the model"),
        ("width", int, "width of the model"),
        ("heads", int, "attention heads"),
        ("context", int, "longest sequence"),
        ("seed", int, "seed of weights and batches"),
    ):
        default = getattr(defaults, name)
        demo.add_argument(
            f"--{name}",
            type=_positive if name != "seed" else kind,
            default=default,
            help=f"{text} (default {default})",
        )
    demo.add_argument("--report", metavar="DIR", help="write the captured graphs to this directory")
    demo.set_defaults(run=lambda arguments, rest: _demo(demo, arguments, rest))


def _add_passes(commands: argparse._SubParsersAction) -> None:
    passes = commands.add_parser("passes", help="list the passes that can be asked for by name")
    passes.add_argument(
        "names", nargs="?", help="tell all about these: fold_constants{max_bytes=16},eliminate_dead_code"
    )
    passes.set_defaults(run=lambda arguments, rest: _passes(passes, arguments, rest))


def _passes(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.names is not None and not arguments.names.strip(" ,"):
        parser.error("no pass is named; leave the names out for a list of all")
    try:
        return list_passes(arguments.names)
    except OptionsError as error:
        parser.error(str(error))


def _add_bisect(commands: argparse._SubParsersAction) -> None:
    bisect = commands.add_parser(
        "bisect",
        help="find the stage, pass and match site that make a script fail",
        description="Run a script again and again, each time with a compilation that ends elsewhere, until the guilty "
        "stage, pass and match site (or operator that Inductor lowers) are found. The script fails when it exits with "
        "another status than 0: an exception, a failed assertion, sys.exit(1). Goes on where a killed search ended.",
    )
    bisect.add_argument(
        "--output", default="fxpasses_bisect", metavar="DIR", help="for the state and the repro file"
    )
    bisect.add_argument("--state", metavar="FILE", help="where answers are kept (default DIR/state.json)")
    bisect.add_argument("--timeout", type=float, metavar="SECONDS", help="after which a run counts as failed")
    bisect.add_argument(
        "--confirm",
        type=_positive,
        default=3,
        metavar="N",
        help="how many runs with what is found guilty, and without, have to agree before that is believed (default 3)",
    )
    bisect.add_argument("script", help="the script; what follows are its arguments")
    bisect.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    bisect.set_defaults(run=lambda arguments, rest: _bisect(bisect, arguments, rest))


def _bisect(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (the script's own go after it)")
    for option in ("--output", "--state", "--timeout"):
        if any(word == option or word.startswith(option + "=") for word in arguments.args):
            print(
                f"{option} comes after the script and is handed to it; options of bisect go before the script",
                file=sys.stderr,
            )
    try:
        verdict = bisect_script(
            arguments.script,
            arguments.args,
            state=arguments.state,
            output=arguments.output,
            timeout=arguments.timeout,
            confirm=arguments.confirm,
        )
    except BisectError as error:
        parser.error(str(error))
    print(verdict.text)
    return 1 if verdict.stage else 0


def _add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        help="compare a model in eager, after each stage, and compiled",
        description="Exits with 1 when a stage is wrong.",
    )
    check.add_argument(
        "model",
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function returns a model and a tuple of inputs",
    )
    check.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    check.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    check.add_argument("--no-backward", action="store_true", help="without gradients")
    check.add_argument(
        "--seconds", type=float, help="how long passes are tried on made-up inputs (as long as it takes)"
    )
    check.add_argument(
        "--option",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, such as regions=always or memory_budget=0.5; may be given several times",
    )
    check.set_defaults(run=lambda arguments, rest: _check(check, arguments, rest))


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    source, _, name = arguments.model.rpartition(":")
    if not source:
        parser.error(f"{arguments.model!r} has no ':FUNCTION' at its end")
    if source.endswith(".py"):
        if not Path(source).is_file():
            parser.error(f"there is no file {source!r}")
        found = runpy.run_path(source)
    else:
        if importlib.util.find_spec(source.partition(".")[0]) is None:
            parser.error(f"there is no module {source!r}; for a file, write {source}.py:{name}")
        found = vars(importlib.import_module(source))
    if name not in found:
        parser.error(f"{source!r} has no {name!r}")
    made = found[name]()
    if not isinstance(made, tuple) or len(made) != 2:
        parser.error(
            f"{name}() returned {type(made).__name__}; it has to return a pair: the model, and a tuple of its inputs"
        )
    model, inputs = made
    try:
        result = check(
            model,
            inputs,
            options={"compiler": arguments.compiler, **dict(arguments.option)},
            dynamic=arguments.dynamic or None,
            backward=not arguments.no_backward,
            seconds=arguments.seconds,
        )
    except OptionsError as error:
        parser.error(str(error))
    return 0 if result.ok else 1


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    fields = {f.name for f in dataclasses.fields(DemoSettings)}
    settings = DemoSettings(**{k: v for k, v in vars(arguments).items() if k in fields})
    if settings.width % settings.heads:
        parser.error(f"--width {settings.width} must be a multiple of --heads {settings.heads}")
    return run_demo(settings)


def _option(text: str) -> tuple[str, Any]:
    """``regions=always`` as a name and a value: a Python literal, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value
