"""Differences of windows on values that their inputs cannot have: a rewrite may rest on that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpasses.checking.comparison.same_function import Rewriting, differences_in_float64
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.execution.inputs import made_up
from fxpasses.exact.ranges import Range, ranges
from fxpasses.exact.samples import Family

_LARGE = 2.0**10


def unreachable(
    rewriting: Rewriting, families: Sequence[Family] = ("random", "signs", "zeros", "ties")
) -> list[str]:
    """Describe differences of windows that no input of the graph shows, each with the reason.

    Args:
        rewriting: of a graph to one that is the same function.
        families: of values to try.
    """
    found: dict[str, None] = {}
    known: dict[str, Range] = {}
    for window in rewriting.windows or ():
        names = [node.name for node in window.before.graph.find_nodes(op="placeholder")]
        for family, scale in itertools.product(families, (1.0, _LARGE)):
            values = made_up(window.inputs, family, torch.Generator().manual_seed(0), scale)
            if not differences_in_float64(window.before, window.after, values):
                continue
            known = known or ranges(rewriting.before)
            found[_describe_difference(window, family, names, values, known)] = None
            break
    return list(found)


def _describe_difference(
    window: Window, family: Family, names: Sequence[str], values: Sequence[object], known: dict[str, Range]
) -> str:
    inside, reasons = list(values), []
    for at, (name, value) in enumerate(zip(names, values, strict=True)):
        if name in known and isinstance(value, Tensor) and value.is_floating_point():
            inside[at] = value.clamp(known[name].low, known[name].high)
            if not torch.equal(inside[at], value):  # type: ignore[arg-type]
                reasons.append(f"{name} {known[name]}")
    calls = ", ".join(name for name, _ in window.change.outputs)
    difference = f"{calls} would differ on {family} values of {', '.join(names)}"
    if reasons and differences_in_float64(window.before, window.after, inside) == []:
        return f"{difference}: not reachable, since {' and '.join(reasons)}"
    return f"{difference}: reached by no inputs that were tried"
