"""Show what a file written by fxpasses.save was made from, and for which calls and machine. Verifies all
checksums, and runs nothing in the file. Exits with 1 if the file is damaged or the signature does not match
the key."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError
from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.files.archive import Archive, read_archive

HELP = "show what is in a file of saved plans (model.fxp)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file and the key."""
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--public-key", metavar="PEM", help="verify the signature with the Ed25519 key in this file"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Read the file and verify it."""
    if arguments.public_key and not Path(arguments.public_key).is_file():
        raise UsageError(f"there is no file {arguments.public_key!r}")
    if arguments.public_key and find_spec("cryptography") is None:
        raise UsageError("signatures need the package 'cryptography' (pip install 'fxpasses[sign]')")
    try:
        archive = read_archive(Path(arguments.file), arguments.public_key)
    except PlanFileError as error:
        text = str(error)
        return Outcome(1, {"problem": text}, lambda: print(text))
    signature = "fits the key" if arguments.public_key else "not checked" if archive.signed else "none"
    return Outcome(0, {**archive.manifest, "signature": signature}, lambda: _show(archive, signature))


def _show(archive: Archive, signature: str) -> None:
    manifest = archive.manifest
    print(f"{manifest['model']}, {len(manifest['plans'])} plans, signature: {signature}")
    for name, value in manifest["made by"].items():
        print(f"  {name}: {value}")
    for number, plan in enumerate(manifest["plans"]):
        kernels = sum(name.startswith("kernel ") for name in plan["sections"])
        print(f"plan {number}: {plan['kind']}, {kernels} kernel libraries")
        for name, value in [*plan["arguments"].items(), *plan["options"].items()]:
            print(f"  {name}: {value}")
        if plan["reads"]:
            print(f"  reads: {', '.join(plan['reads'])}")
    size = sum(facts["bytes"] for facts in manifest["files"].values())
    print(f"{len(manifest['files'])} members, {size} bytes, all match the manifest")
