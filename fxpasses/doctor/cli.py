"""``python -m fxpasses doctor``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fxpasses.doctor.health import examine, versions
from fxpasses.doctor.seam import check_seam

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 where a name of torch that this package uses is missing, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m fxpasses doctor",
        description="What is in force with this torch, compiler and cache, what is not, why, and what to do.",
    )
    parser.add_argument(
        "--torch",
        action="store_true",
        help="hold every name of torch that this package uses, and every call, against the installed torch: where a "
        "port to another release begins; exits with 1 if something is missing",
    )
    choice = parser.parse_args(argv)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    if choice.torch:
        report = check_seam()
        print(report)
        return 0 if report.ok else 1
    for finding in examine():
        print(finding)
    return 0
