"""Private torch names that tell Dynamo what became of a graph's floats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.symbolic_convert import TensorifyState

from fake.seam.dynamo import TensorifyScalarRestartAnalysis
from fake.seam.symbolic_shapes import SymT, hints_of, symbol_is_type


def mark_floats_specialized(shape_env: Any, kept: set[Any]) -> None:
    """Tell AOTAutograd that only the floats in ``kept`` are left for it to convert or specialize."""
    for symbol in hints_of(shape_env):
        if symbol_is_type(symbol, SymT.FLOAT) and symbol not in kept:
            TensorifyState.specialize(str(symbol))


def retrace_with_constant_floats(shape_env: Any) -> None:
    """Make Dynamo retrace with all floats as constants instead of inputs. Does nothing if it already did."""
    floats = [str(s) for s in hints_of(shape_env) if symbol_is_type(s, SymT.FLOAT)]
    left = [name for name in floats if not TensorifyState.should_specialize(name)]
    for name in left:
        TensorifyState.specialize(name)
    if left:
        raise TensorifyScalarRestartAnalysis


@contextlib.contextmanager
def floats_of_one_graph() -> Iterator[None]:
    """Limit facts about floats that are stated in this block (see :func:`mark_floats_specialized`) to it.

    Torch keeps them by symbol name for whatever it traces next. There the name may be another input's, and
    Dynamo then drops writes to that input (torch 2.13). They are kept only if Dynamo is about to retrace the
    same code.
    """
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise
    except BaseException:
        TensorifyState.clear()
        raise
    TensorifyState.clear()
