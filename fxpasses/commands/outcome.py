"""What commands share: their outcome, the mistake of a user, a sign of life while something takes long."""

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
        """Declare the arguments; imports nothing heavy."""

    def run(self, arguments: Any) -> Outcome:
        """Do it."""


class UsageError(Exception):
    """The user asked for something that there is not; told in one line, with status 2."""


def nothing() -> None:
    """Print nothing: the command has told it already."""


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        status: the exit status: 0, or 1 where something is wrong with what was looked at.
        data: the same for ``--json``.
        show: prints it for people.
    """

    status: int
    data: Any
    show: Callable[[], None] = nothing


def console() -> Any:
    """A console of ``rich`` on standard output: in a file or pipe as wide as tables are, and not the 80 columns of no terminal."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=160)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[..., None]]:
    """Say on standard error what is being done, with the time it takes and what remains, while it is done; nothing in a file or pipe.

    Args:
        what: is done.

    Returns:
        A context manager; it gives a function that changes the text, and may be told how many parts are ``done`` of how many.
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
            """Show what is done. Args: the text, and how many parts are done of how many."""
            count = f", {done} of {total}" if total else ""
            progress.update(task, description=text + count, completed=done, total=total)

        yield tell


def positive(text: str) -> int:
    """An integer of at least 1, for an argument."""
    import argparse

    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def plain_data(value: Any) -> Any:
    """A value as JSON takes it: dataclasses and mappings as objects, sets sorted, everything unknown as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain_data, value))
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)  # JSON has no infinity and no NaN
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def end_quietly() -> None:
    """Let Python write nowhere at exit: who read standard output has gone (``| head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
