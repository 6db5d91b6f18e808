"""Rounding of a rewrite: one that is the same function may be as far from it as the graph before was, and not much farther.

Both sides of a window run on the same inputs in their own types, and the graph before in float64. What each side is off by is measured there,
where it rounds (:mod:`fxpasses.checking.rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses._torch import OpOverload
from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import CANNOT_RUN, ExactRun, Run
from fxpasses.checking.rounding import EXACT, LIMIT, Distance, distance, moved, next_to, of_element, spacing
from fxpasses.errors import Location
from fxpasses.graphs.provenance import locate
from fxpasses.graphs.rewriting import value_of

_SEED = 20
_MOVES = 2
_NEARBY = 4
_TURNED_BY = 32.0
"""Twice the units in the last place of inputs by which what is compared may be moved."""
_POWERS = 8
"""Elements within so many powers of two of each other are judged together."""
_SMALLEST = 32
"""Powers of two below the largest element; what is smaller may be what float64 leaves of a sum that cancels."""
_SMALLEST_ALONE = 96
"""The same where each element is computed alone."""
_FEWEST = 4
_SUMS = {
    getattr(torch.ops.aten, name)
    for name in [
        "sum",
        "mean",
        "cumsum",
        "prod",
        "var",
        "var_mean",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "scatter_add",
        "index_add",
    ]
}
_COPIES = {
    torch.ops.prims.convert_element_type,
    *(
        getattr(torch.ops.aten, name)
        for name in [
            "_to_copy",
            "clone",
            "copy",
            "fill",
            "where",
            "masked_fill",
            "neg",
            "abs",
            "relu",
            "clamp",
            "maximum",
            "minimum",
        ]
    ),
}
"""Elementwise operators whose results are elements that they were given, or whose rounding is a cast's."""


def less_precise(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any], limit: float = LIMIT
) -> dict[int, Distance]:
    """The results that the graph after rounds worse than it may, by position; infinitely so where they are not finite any more.

    Args:
        before: the graph before, or what a window holds of it.
        after: the same function.
        inputs: of both.
        limit: how many times as far off they may be.
    """
    usual, got = _run(before, inputs), _run(after, inputs)
    exact = ExactRun(before).results(inputs)
    if usual is None or got is None or exact is None:
        return {}
    found: dict[int, Distance] = {}
    is_elementwise = all(map(_is_elementwise, (before, after)))
    for position, (mine, theirs, center) in enumerate(zip(usual, got, exact, strict=False)):
        if _is_turned_over(mine, theirs):
            how = _turned_over(before, inputs, position, (mine, theirs, center))
            found |= {position: how} if how is not None else {}
        if not _is_judged(mine, theirs, center) or torch.equal(mine, theirs):
            continue
        # What only moves values is held to its inputs: they were rounded to their types before, and may be once more.
        rounds = not torch.equal(mine.double(), center.double())
        dtype = _finest_dtype(before, mine.dtype) if rounds else _computing_dtype(before)
        runs = [ExactRun(before).results(moved(inputs, seed, dtype)) for seed in range(_MOVES)]
        others = [run[position] for run in runs if run is not None]
        for part in _by_magnitude(center, mine.dtype, is_elementwise):
            how = distance(mine, theirs, [center, *others], part)
            if how is not None and limit < how.times < math.inf:
                nearby = max(_errors_nearby(before, inputs, position, part), default=0.0)
                how = replace(how, times=min(how.times, how.after / nearby)) if nearby else how
            if how is not None and how.times > limit:
                found[position] = replace(how, where=str(_digits_lost_at(after, inputs, dtype)))
                break
    return found


def _is_turned_over(mine: Any, theirs: Any) -> bool:
    """Whether two results of integers or flags differ."""
    both = [value for value in (mine, theirs) if isinstance(value, Tensor)]
    if len(both) < 2 or mine.shape != theirs.shape or mine.is_floating_point() or mine.is_complex():
        return False
    return not torch.equal(mine, theirs)


def _turned_over(
    before: fx.GraphModule, inputs: Sequence[Any], position: int, values: Sequence[Tensor]
) -> Distance | None:
    """The elements of integers and flags that were as in float64 and are not any more, where no rounding of the inputs explains it."""
    mine, theirs, center = values
    wrong = (mine == center) & (theirs != center)
    kinds = [v.dtype for v in map(value_of, before.graph.nodes) if isinstance(v, Tensor)]
    coarsest = max(filter(_is_float, kinds), key=lambda kind: torch.finfo(kind).eps, default=None)
    for seed in range(_NEARBY if bool(wrong.any()) else 0):
        run = ExactRun(before).results(moved(inputs, seed, coarsest, units=_TURNED_BY))
        wrong &= torch.ones_like(wrong) if run is None else run[position] == center
    how = of_element(mine, theirs, wrong)
    return None if how is None else replace(how, times=2 * EXACT)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _digits_lost_at(gm: fx.GraphModule, inputs: Sequence[Any], dtype: torch.dtype | None) -> Location:
    """The call of a graph whose result is off by the most, next to what it was given."""
    own, wide = Run(gm, keep=True), ExactRun(gm, keep=True)
    own(cloned(inputs), _SEED)
    wide.results(inputs)  # up to where it can be run
    off: dict[fx.Node, float] = {}
    worst, most = Location(), 0.0
    for node in gm.graph.nodes:
        value, exact = own.values.get(node.name), wide.values.get(node.name)
        if exact is None or not isinstance(value, Tensor) or not _is_judged(value, exact):
            continue
        units = ((value.double() - exact) / spacing(exact.nan_to_num(), dtype or value.dtype))[exact != 0]
        units = units[units.isfinite()]
        off[node] = units.square().mean().sqrt().item() if units.numel() else 0.0
        times = off[node] / max([1.0, *(off.get(given, 0.0) for given in node.all_input_nodes)])
        if times > most and node.op == "call_function":
            worst, most = locate(node), times
    return worst


def _by_magnitude(center: Tensor, dtype: torch.dtype, is_elementwise: bool) -> Iterator[Tensor]:
    """All elements of a result, then those of each magnitude: a few large ones hide that the others have no digit left.

    Not where each call rounds to few digits: there, small elements have few whatever is done.
    """
    yield torch.ones_like(center, dtype=torch.bool)
    if torch.finfo(dtype).bits < 32:
        return
    size = center.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = size.max() if size.numel() else 0.0
    smallest, fewest = (_SMALLEST_ALONE, 1) if is_elementwise else (_SMALLEST, _FEWEST)
    for power in range(0, smallest, _POWERS):
        part = (size <= largest * 2.0**-power) & (size > largest * 2.0 ** -(power + _POWERS))
        if int(part.sum()) >= fewest:
            yield part


def _is_elementwise(gm: fx.GraphModule) -> bool:
    """Whether no element of what a graph returns is made of several elements of one value."""
    return all(
        isinstance(n.target, OpOverload) and torch.Tag.pointwise in n.target.tags
        for n in gm.graph.nodes
        if n.op == "call_function"
    )


def _errors_nearby(
    before: fx.GraphModule, inputs: Sequence[Any], position: int, part: Tensor
) -> Iterator[float]:
    """How far off a part of a result of the graph is for inputs that are a few units away: on one element it may be right by luck."""
    for seed in range(_NEARBY):
        given = next_to(inputs, seed, units=16.0)
        usual, exact = _run(before, given), ExactRun(before).results(given)
        if usual is not None and exact is not None:
            off = (usual[position].double() - exact[position].double())[part]
            off = off[off.isfinite()]
            if off.numel():
                yield off.square().mean().sqrt().item()


def _run(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any] | None:
    try:
        return Run(gm)(cloned(inputs), _SEED)
    except CANNOT_RUN:
        return None


def _is_judged(*values: Any) -> bool:
    return all(isinstance(v, Tensor) and v.is_floating_point() and v.shape == values[0].shape for v in values)


def _finest_dtype(gm: fx.GraphModule, dtype: torch.dtype) -> torch.dtype:
    """The type with the most digits that the graph computes in."""
    kinds = [
        v.dtype for v in map(value_of, gm.graph.nodes) if isinstance(v, Tensor) and v.is_floating_point()
    ]
    return min([dtype, *kinds], key=lambda kind: torch.finfo(kind).eps)


def _computing_dtype(gm: fx.GraphModule) -> torch.dtype | None:
    """The type with the most digits in which the graph does arithmetic; ``None`` where it does none."""
    kinds = [
        value.dtype
        for node in gm.graph.nodes
        if isinstance(node.target, OpOverload) and node.target.overloadpacket not in _COPIES
        if torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _SUMS
        if isinstance(value := value_of(node), Tensor) and value.is_floating_point()
    ]
    return min(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)
