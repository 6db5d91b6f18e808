"""``probe module:op --samples file.py``: the source of the derived fake kernel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fake.library.errors import ProbeError, SamplesError, UnknownOpError
from fake.library.probe.api import probe
from fake.library.samples import find_operator, read_samples

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rule's source; returns 1 if there is none. Without an operator or a sample it exits with 2."""
    parser = argparse.ArgumentParser(
        prog="probe", description="Derive an operator's fake kernel from its real one."
    )
    parser.add_argument(
        "op", help="module:operator, or namespace::name of an operator that the samples file imports"
    )
    parser.add_argument("--samples", required=True, help="Python file that defines `samples`")
    parser.add_argument(
        "--budget", type=int, default=90, help="kernel calls to spend on each sample (default 90)"
    )
    options = parser.parse_args(argv)
    try:
        samples = read_samples(options.samples)
        rule = probe(find_operator(options.op), samples, budget=options.budget)
    except (SamplesError, UnknownOpError, ProbeError) as error:
        parser.error(str(error))
    print(rule)
    for question in rule.open_questions:
        print(_comment(f"undecided: {question}"))
    for crash in rule.crashes:
        print(_comment(f"not covered: {crash}"))
    return 0 if rule.decided else 1


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
