"""``opcheck module:op --samples file.py``: the verdict for each sample."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fake.library.errors import SamplesError, UnknownOpError
from fake.library.opcheck.runner import ALL_TEST_UTILS, opcheck, resolve
from fake.library.samples import find_operator, read_samples

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts; returns 1 if a check failed. Without an operator or a sample it exits with 2."""
    parser = argparse.ArgumentParser(
        prog="opcheck", description="Check an operator's registrations on sample calls."
    )
    parser.add_argument(
        "op", help="module:operator, or namespace::name of an operator that the samples file imports"
    )
    parser.add_argument("--samples", required=True, help="Python file that defines `samples`")
    parser.add_argument(
        "--check", action="append", choices=list(ALL_TEST_UTILS), help="only this check; repeatable"
    )
    parser.add_argument(
        "--all", action="store_true", help="report every check, not only torch's four and failures"
    )
    options = parser.parse_args(argv)
    try:
        samples = read_samples(options.samples)
        op = find_operator(options.op)
        resolve(op)
    except (SamplesError, UnknownOpError, RuntimeError) as error:
        parser.error(str(error))
    checks = options.check or ("ALL" if options.all else None)
    failed = 0
    for number, (args, kwargs) in enumerate(samples):
        verdict = opcheck(op, args, kwargs, test_utils=checks, raise_exception=False)
        print(f"sample {number}: {verdict}")
        failed += not verdict.ok
    print(f"{len(samples) - failed} of {len(samples)} samples passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
