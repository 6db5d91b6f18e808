"""What commands share: their outcome, user errors, and progress on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Command(Protocol):
    """One command: a module with these names."""

    HELP: str

    def add_arguments(self, parser: Any) -> None:
        """Declare the arguments, without heavy imports."""

    def run(self, arguments: Any) -> Outcome:
        """Run the command."""


class UsageError(Exception):
    """The user asked for something that does not exist. Reported in one line, with status 2."""


def nothing() -> None:
    """Print nothing: the command has already printed its result."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        status: the exit status: 0, or 1 if something is wrong with what was examined.
        data: the result for ``--json``.
        show: prints the result for people.
    """

    status: int
    data: Any
    show: Callable[[], None] = nothing


def console() -> Any:
    """Return a ``rich`` console on standard output.

    In a file or pipe it is as wide as tables need, instead of the default of 80 columns.
    """
    from rich.console import Console

    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=160)


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Callable[..., None]]:
    """Show progress on standard error while inside; nothing in a file or pipe.

    Args:
        what: what is being done.

    Returns:
        A context manager. It yields a function that changes the text, and takes how many parts of ``total``
        are ``done``.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, done=0, total=None: None
        return
    text_column = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text_column, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def tell(text: str, done: int = 0, total: int | None = None) -> None:
            """Show progress. Args: the text, and how many parts are done of how many."""
            count = f", {done} of {total}" if total else ""
            progress.update(task, description=text + count, completed=done, total=total)

        yield tell


def positive(text: str) -> int:
    """Parse an integer of at least 1, as an argument type."""
    import argparse

    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def plain_data(value: Any) -> Any:
    """Convert a value for JSON: dataclasses and mappings to objects, sets to sorted lists, others to text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain_data, value))
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)  # JSON has no infinity or NaN
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def discard_stdout() -> None:
    """Make Python's flush at exit write to nowhere: standard output has no reader left (``| head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
