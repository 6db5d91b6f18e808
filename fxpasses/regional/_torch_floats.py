"""The private torch names by which Dynamo is told what became of the floats of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.symbolic_convert import TensorifyState

from fake.seam.dynamo import TensorifyScalarRestartAnalysis
from fake.seam.symbolic_shapes import SymT, hints_of, symbol_is_type


def floats_are_settled(shape_env: Any, kept: set[Any]) -> None:
    """Tell AOTAutograd that no float of a graph is left for it to make a tensor or a number of, but those in ``kept``."""
    for symbol in hints_of(shape_env):
        if symbol_is_type(symbol, SymT.FLOAT) and symbol not in kept:
            TensorifyState.specialize(str(symbol))


def trace_again_with_constants(shape_env: Any) -> None:
    """Send Dynamo back to trace with all floats as constants, which are no inputs then; nothing when it did."""
    floats = [str(s) for s in hints_of(shape_env) if symbol_is_type(s, SymT.FLOAT)]
    left = [name for name in floats if not TensorifyState.should_specialize(name)]
    for name in left:
        TensorifyState.specialize(name)
    if left:
        raise TensorifyScalarRestartAnalysis


@contextlib.contextmanager
def floats_of_one_graph() -> Iterator[None]:
    """Facts about floats that are stated in the block (see :func:`floats_are_settled`) end with it.

    Torch keeps it by symbol name for whatever it traces next, where the name may be another input's: Dynamo then drops writes
    to that input (torch 2.13). Only when Dynamo is sent back to trace the same code again is it for that trace to read.
    """
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise
    except BaseException:
        TensorifyState.clear()
        raise
    TensorifyState.clear()
