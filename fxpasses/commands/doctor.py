"""Show what is in force with this torch, compiler and cache, what is not, why, and what to do."""

from __future__ import annotations

import argparse

from fxpasses.commands.outcome import Outcome, plain_data, show_progress

HELP = "show what is in force with this torch and compiler, what is not, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--names`` and ``--torch``."""
    parser.add_argument(
        "--names", action="store_true", help="list every patch of torch, with what is lost without it"
    )
    parser.add_argument(
        "--torch",
        action="store_true",
        help="check that the installed torch has every name that the seam uses and takes its calls, as the "
        "first step of a port to another release; exits with 1 if something is missing or does not fit",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Examine torch and this machine."""
    with show_progress("examining torch and this machine"):
        from fxpasses.doctor.health import abbreviated, examine, versions
        from fxpasses.doctor.seam import check_seam

        found = versions()
        head = ", ".join(f"{name} {version}" for name, version in found.items())
        if arguments.torch:
            seam = check_seam()
            data = {"versions": found, "ok": seam.ok, **plain_data(seam)}
            return Outcome(0 if seam.ok else 1, data, lambda: print(head, seam, sep="\n"))
        findings = examine()
    data = {
        "versions": found,
        "findings": [
            {"on": finding.on, **plain_data(finding), **({"advice": ""} if finding.on else {})}
            for finding in findings
        ],
    }
    return Outcome(
        0, data, lambda: print(head, *(findings if arguments.names else abbreviated(findings)), sep="\n")
    )
