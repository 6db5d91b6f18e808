"""Show what tuning found on this machine: each pass and setting that was tried on each graph, what it gained,
and what the checks say. With --against, compare each with another ledger, and exit with 1 if a step does
worse than there."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError, console
from fxpasses.plans.files.plan_files import cache_directory
from fxpasses.tuning.kept import read_ledger
from fxpasses.tuning.tuning_ledger import Entry, changes, table_of_changes, table_of_entries

HELP = "print what tuning found, or compare it with another ledger"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the ledgers."""
    parser.add_argument(
        "ledger",
        nargs="?",
        help="a cache directory, a report directory, or the output of --json "
        "(default: this user's cache directory)",
    )
    parser.add_argument(
        "--against", metavar="LEDGER", help="the ledger to compare with, in any of these forms"
    )
    parser.add_argument("--step", help="show only steps (passes or settings) whose names start with this")


def run(arguments: argparse.Namespace) -> Outcome:
    """Read the ledger, and compare it if asked to."""
    own = cache_directory("auto")
    source = Path(arguments.ledger) if arguments.ledger else own
    if source is None:
        raise UsageError(
            "FXPASSES_CACHE_DIR is 'off', or TORCHINDUCTOR_FORCE_DISABLE_CACHES is 1: "
            "name a cache directory, a report directory, or a file with the output of --json"
        )
    entries = _read(source, arguments.step)
    if arguments.against is None:
        data = [entry.to_data() for entry in entries]
        nothing = "no results of tuning, or none for such a step"
        return Outcome(0, data, lambda: _show(table_of_entries(entries) if entries else nothing))
    found = changes(_read(Path(arguments.against), arguments.step), entries)
    rows = [
        {
            "change": change.word,
            "before": change.before and change.before.to_data(),
            "now": change.after and change.after.to_data(),
        }
        for change in found
    ]
    worse = any(change.word == "loses" for change in found)
    return Outcome(int(worse), rows, lambda: _show(table_of_changes(found)))


def _read(path: Path, step: str | None) -> list[Entry]:
    if not path.exists() and path == cache_directory("auto"):
        return []
    return [entry for entry in read_ledger(path) if entry.step.startswith(step or "")]


def _show(table: object) -> None:
    console().print(table)
