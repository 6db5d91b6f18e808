"""What ``opcheck`` and ``probe`` are given: an operator, and a file with sample calls."""

from __future__ import annotations

import argparse
from typing import Any

from fxpasses.commands.outcome import UsageError


def add_operator(parser: argparse.ArgumentParser) -> None:
    """Declare the operator and ``--samples``."""
    parser.add_argument(
        "op", help="module:operator, or namespace::name of an operator that the samples file imports"
    )
    parser.add_argument("--samples", required=True, metavar="FILE", help="Python file that defines `samples`")


def read_operator(arguments: argparse.Namespace) -> tuple[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The operator and its sample calls.

    Raises:
        UsageError: when either is not there.
    """
    from fake.library.errors import SamplesError, UnknownOpError
    from fake.library.opcheck.runner import resolve
    from fake.library.samples import find_operator, read_samples

    try:
        samples, op = read_samples(arguments.samples), find_operator(arguments.op)
    except (SamplesError, UnknownOpError) as error:
        raise UsageError(str(error)) from error
    try:
        resolve(op)
    except (UnknownOpError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    return op, samples
