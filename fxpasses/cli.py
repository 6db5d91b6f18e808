"""The command line: ``python -m fxpasses COMMAND``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from fake.library.opcheck.cli import main as opcheck
from fake.library.probe.cli import main as probe
from fxpasses.demo import DemoSettings
from fxpasses.demo.show import run_demo

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fxpasses", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    for name, run, text in _OF_CUSTOM_OPERATORS:
        command = commands.add_parser(name, help=text, add_help=False)
        command.set_defaults(run=lambda _, rest, run=run: run(rest))
    arguments, rest = parser.parse_known_args(argv)
    return arguments.run(arguments, rest)


_OF_CUSTOM_OPERATORS = (
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


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    fields = {f.name for f in dataclasses.fields(DemoSettings)}
    settings = DemoSettings(**{k: v for k, v in vars(arguments).items() if k in fields})
    if settings.width % settings.heads:
        parser.error(f"--width {settings.width} must be a multiple of --heads {settings.heads}")
    return run_demo(settings)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value
