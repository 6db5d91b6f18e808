"""List, verify or clear the caches on disk: compiled graphs (Inductor's directory), plans and tuning results
(FXPASSES_CACHE_DIR), and fake tensor dispatch (FAKE_DISPATCH_CACHE). "list" shows their sizes. "verify" reads
each entry, and exits with 1 if one is damaged. "clear" removes them."""

from __future__ import annotations

import argparse
import os
import pickletools
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError, console, show_progress
from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.files.plan_files import cache_directory, check_owner, read_sections
from fxpasses.tuning.kept import read_result

HELP = "list, verify or clear the caches on disk"
_CACHES = ("inductor", "plans", "tuned", "fake")
_OWN_FILES = {
    "fake": ("*.segment",),
    "plans": ("*/*.plan", "*/*.none", "kernels/*.so", "sources/*"),
    "tuned": ("tuned/*/*.json", "tuned/calls/*.call"),
}
_WHY_NO_DIRECTORY = {
    "plans": "FXPASSES_CACHE_DIR is 'off', or TORCHINDUCTOR_FORCE_DISABLE_CACHES is 1",
    "tuned": "FXPASSES_CACHE_DIR is 'off', or TORCHINDUCTOR_FORCE_DISABLE_CACHES is 1",
    "fake": "FAKE_DISPATCH_CACHE is not set",
}
"""Why a cache has no directory."""
_PICKLED = ("aotautograd", "fxgraph")
"""Folders of Inductor's directory whose files are pickles."""


@dataclass(frozen=True)
class Entry:
    """One folder of a cache or, for ``verify``, one file that is not used.

    Attributes:
        cache: one of the words of ``--only``.
        path: the folder or file.
        files: the number of files in it.
        bytes: their total size.
        problem: what is wrong, or why it is not used.
    """

    cache: str
    path: str
    files: int
    bytes: int
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action and the cache."""
    parser.add_argument("action", choices=("list", "verify", "clear"))
    parser.add_argument("--only", choices=_CACHES, help="use only this cache")
    parser.add_argument(
        "--fake-directory",
        metavar="DIR",
        default=os.environ.get("FAKE_DISPATCH_CACHE"),
        help="directory of the dispatch cache (default: FAKE_DISPATCH_CACHE)",
    )
    parser.add_argument("--yes", action="store_true", help="clear without asking")


def run(arguments: argparse.Namespace) -> Outcome:
    """Run the action."""
    roots = _roots(arguments)
    if arguments.action == "verify":
        return _verify(roots)
    entries = [entry for cache, root in roots.items() for entry in _folders(cache, root)]
    if arguments.action == "list":
        wanted = [arguments.only] if arguments.only else _CACHES
        missing = {cache: _WHY_NO_DIRECTORY[cache] for cache in wanted if cache not in roots}
        return Outcome(0, entries, lambda: _show(roots, entries, missing))
    if entries and not arguments.yes:
        _confirm(entries)
    for entry in entries:
        path = Path(entry.path)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    size = sum(entry.bytes for entry in entries)
    return Outcome(
        0, entries, lambda: print(f"removed {_size(size)} in {sum(e.files for e in entries)} files")
    )


def _confirm(entries: list[Entry]) -> None:
    size = _size(sum(entry.bytes for entry in entries))
    if not sys.stdin.isatty():
        raise UsageError(f"this would remove {size}: pass --yes to confirm")
    where = ", ".join(sorted({str(Path(entry.path).parent) for entry in entries}))
    print(f"Remove {size} in {where}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was removed")


def _roots(arguments: argparse.Namespace) -> dict[str, Path]:
    wanted = [arguments.only] if arguments.only else [*_CACHES]
    roots = {}
    if "inductor" in wanted:
        with show_progress("importing torch"):
            from fxpasses._torch import compile_cache_directory
        roots["inductor"] = Path(compile_cache_directory())
    directory = cache_directory("auto")
    roots |= {name: directory for name in ("plans", "tuned") if name in wanted and directory is not None}
    if "fake" in wanted and arguments.fake_directory:
        roots["fake"] = Path(arguments.fake_directory)
        if not roots["fake"].is_dir() and arguments.fake_directory != os.environ.get("FAKE_DISPATCH_CACHE"):
            raise UsageError(f"there is no directory {arguments.fake_directory!r}")
    elif arguments.only == "fake":
        raise UsageError(
            "pass the directory of the dispatch cache as --fake-directory, or set FAKE_DISPATCH_CACHE"
        )
    return roots


def _folders(cache: str, root: Path) -> list[Entry]:
    """Return what ``clear`` removes.

    That is all of Inductor's directory, by folder. In other directories, which the user may have chosen, it
    is only our own files.
    """
    if cache in _OWN_FILES:
        return [
            Entry(cache, str(p), 1, p.stat().st_size)
            for pattern in _OWN_FILES[cache]
            for p in sorted(root.glob(pattern))
            if p.is_file()
        ]
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
        found.append(Entry(cache, str(path), len(files), sum(p.stat().st_size for p in files)))
    return found


def _verify(roots: dict[str, Path]) -> Outcome:
    problems, looked_at = [], 0
    with show_progress("reading the caches") as tell:
        pickles = [
            path
            for folder in _PICKLED
            if "inductor" in roots
            for path in sorted((roots["inductor"] / folder).rglob("*"))
            if path.is_file() and not path.name.endswith(".lock")
        ]
        for path in pickles:
            looked_at += 1
            tell("reading the caches", looked_at, len(pickles))
            problem = _problem_of_pickle(path)
            if problem:
                problems.append(Entry("inductor", str(path), 1, path.stat().st_size, problem))
        if "fake" in roots:
            from fake.cache.disk import segments

            for segment in segments(roots["fake"]):
                looked_at += 1
                if segment.problem:
                    problem = ("damaged: " if segment.damaged else "not used: ") + segment.problem
                    problems.append(Entry("fake", str(segment.path), 1, segment.bytes, problem))
        for cache in ("plans", "tuned"):
            for entry in _folders(cache, roots[cache]) if cache in roots else ():
                looked_at += 1
                problem = _problem_of_file(Path(entry.path))
                if problem:
                    problems.append(replace(entry, problem=problem))
    damaged = sum(entry.problem.startswith("damaged") for entry in problems)

    def show() -> None:
        for entry in problems:
            print(f"{entry.path}: {entry.problem}")
        print(f"files read: {looked_at}, damaged: {damaged}")

    return Outcome(int(damaged > 0), {"files": looked_at, "damaged": damaged, "problems": problems}, show)


def _problem_of_file(path: Path) -> str:
    """Return why a plan or tuning result is not used, or ""."""
    try:
        if path.suffix in (".plan", ".none"):
            read_sections(path)
        elif path.suffix == ".json":
            read_result(path)
        else:
            check_owner(path)
    except PlanFileError as error:
        return f"{'not used' if error.is_untrusted else 'damaged'}: {error.problem}"
    except OSError as error:
        return f"damaged: {error.strerror}"
    return ""


def _problem_of_pickle(path: Path) -> str:
    """Return why a file is not one complete pickle, or "". Nothing is unpickled, so no code in it runs."""
    try:
        for _ in pickletools.genops(path.read_bytes()):
            pass
    except (ValueError, OSError, UnicodeDecodeError) as error:
        return f"damaged: {error}"
    return ""


def _show(roots: dict[str, Path], entries: list[Entry], missing: dict[str, str]) -> None:
    from rich.table import Table

    for cache, root in roots.items():
        mine = [entry for entry in entries if entry.cache == cache]
        print(f"{cache}: {root}")
        table = Table(box=None, header_style="bold")
        table.add_column("entry")
        table.add_column("files", justify="right")
        table.add_column("size", justify="right")
        largest = sorted(mine, key=lambda entry: -entry.bytes)
        for entry in largest[:15]:
            table.add_row(str(Path(entry.path).relative_to(root)), str(entry.files), _size(entry.bytes))
        if len(largest) > 15:
            rest = largest[15:]
            table.add_row(
                f"{len(rest)} more", str(sum(e.files for e in rest)), _size(sum(e.bytes for e in rest))
            )
        table.add_row(
            "total", str(sum(e.files for e in mine)), _size(sum(e.bytes for e in mine)), style="bold"
        )
        console().print(table)
    for cache, variable in missing.items():
        print(f"{cache}: no directory ({variable})")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
