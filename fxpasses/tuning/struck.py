"""Striking: if the program of a kept choice fails later, nobody uses it any more, and all are told."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from fake.error_text import describe_error
from fxpasses.counters import Fallback, counters
from fxpasses.tuning.kept import TuningResult, read_if_valid, write_result

__all__ = ["strike", "strike_for_backward", "told_struck"]

log = logging.getLogger(__name__)


def told_struck(graph: str, steps: str, what: str) -> str:
    """Return the note that an error gets when the failed call cannot be repeated without the tuned program.

    Args:
        graph: the digest of the graph.
        steps: what was chosen for it.
        what: what raised the error: ``"whose backward pass"`` or ``"which"``.
    """
    return f"fxpasses: graph {graph[:8]} ran a tuned program ({steps}), {what} raised this; it is struck, and the next call runs without it"


def strike(path: Path | None, struck: TuningResult) -> None:
    """Record that a choice failed: in the log, in the counters, and on disk for later processes.

    Args:
        path: where the choice is kept.
        struck: the result with the choice struck.
    """
    log.warning("a tuned program is struck, and the graph runs without it: %s", struck.struck)
    counters.add_fallback(Fallback("tuning", struck.struck, struck.graph))
    if path is not None:
        write_result(path, struck)


def strike_for_backward(files: Iterable[str], error: Exception) -> None:
    """Strike the choices of a program that failed in its backward pass, and add a note to the error.

    Args:
        files: where they are kept.
        error: the error that was raised.
    """
    for path in map(Path, files):
        result = read_if_valid(path)
        if result is not None and not result.struck:
            steps = ", ".join(step["name"] for step in result.steps)
            error.add_note(told_struck(result.graph, steps, "whose backward pass"))
            why = f"in the backward pass: {describe_error(error)}"
            strike(path, result.struck_for(result.graph, why))
