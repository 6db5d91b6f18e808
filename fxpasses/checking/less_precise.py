"""Rounding: is a rewrite that is the same function as far from it as the graph before was, or farther.

Both sides of a window run on the same inputs in their own types, and the graph before in float64. What each side is off by is measured there,
where it rounds. The yardstick is the largest of three: what the side before is off by, there or for inputs next to them, correct rounding of the
results, and what
half a unit in the last place, of the finest type that the graph before
computes in, does to them when the *inputs* move by it, which no way to compute the function can be blamed for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses._torch import OpOverload
from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import CANNOT_RUN, ExactRun, Run
from fxpasses.checking.rounding import spacing
from fxpasses.graphs.rewriting import value_of

__all__ = ["LIMIT", "LessPrecise", "less_precise"]

LIMIT = 16.0
"""How many times as far off a rewrite may be, as a root mean square over a tensor. Right rewrites were at most 3.1 times as far; a sum that is
accumulated in bfloat16 and not in float32 is thousands of times."""
_SEED = 20
_MOVES = 2
_NEARBY = 4
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


@dataclass(frozen=True)
class LessPrecise:
    """A result that rounds too much.

    Attributes:
        position: of the result.
        times: how many times as far off it is as it may be at no fault.
        before: root mean square of the distances from float64, before.
        after: the same, after.
        ulps: ``after`` in units in the last place of the largest value.
    """

    position: int
    times: float
    before: float
    after: float
    ulps: float

    def __str__(self) -> str:
        return (
            f"LESS PRECISE: off by {self.after:.3g} from float64 in the mean ({self.ulps:.3g} ulp), {self.times:.3g} times as far "
            f"as rounding takes it (before: {self.before:.3g})"
        )


def less_precise(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any], limit: float = LIMIT
) -> list[LessPrecise]:
    """The results that the graph after rounds worse than it may.

    Args:
        before: the graph before, or what a window holds of it.
        after: the same function.
        inputs: of both.
        limit: how many times as far off they may be.
    """
    usual, got = _run(Run(before), inputs), _run(Run(after), inputs)
    exact = _run(ExactRun(before), inputs)
    if usual is None or got is None or exact is None:
        return []
    found = []
    for position, (mine, theirs, center) in enumerate(zip(usual, got, exact, strict=False)):
        if not _is_judged(mine, theirs, center) or torch.equal(mine, theirs):
            continue
        # What only moves values is held to its inputs: they were rounded to their types before, and may be once more.
        rounds = not torch.equal(mine.double(), center.double())
        dtype = _finest_dtype(before, mine.dtype) if rounds else _computing_dtype(before)
        runs = (_run(ExactRun(before), _moved(inputs, seed, dtype)) for seed in range(_MOVES))
        how = _judged(position, mine, theirs, center, [run[position] for run in runs if run is not None])
        if how is not None and how.times > limit:
            nearby = max(_errors_nearby(before, inputs, position), default=0.0)
            how = replace(how, times=min(how.times, how.after / nearby)) if nearby else how
        if how is not None and how.times > limit:
            found.append(how)
    return found


def _errors_nearby(before: fx.GraphModule, inputs: Sequence[Any], position: int) -> Iterator[float]:
    """How far off a result of the graph is for inputs that are a few units away: on one element it may be right by luck."""
    for seed in range(_NEARBY):
        moved = _moved(inputs, seed, None, units=16.0)
        given = [m.to(v.dtype) if isinstance(v, Tensor) else m for m, v in zip(moved, inputs, strict=True)]
        usual, exact = _run(Run(before), given), _run(ExactRun(before), given)
        if usual is not None and exact is not None:
            off = (usual[position].double() - exact[position].double()).flatten()
            off = off[off.isfinite()]
            if off.numel():
                yield off.square().mean().sqrt().item()


def _run(run: Run, inputs: Sequence[Any]) -> list[Any] | None:
    try:
        return run(cloned(inputs), _SEED)
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


def _moved(inputs: Sequence[Any], seed: int, dtype: torch.dtype | None, units: float = 1.0) -> list[Any]:
    """The inputs, in float64, with each element moved by up to half a unit in the last place.

    Args:
        inputs: of a graph.
        seed: of the draw.
        dtype: of which the units are; each input's own, if it is None.
        units: by up to half of so many units instead.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        wide = value.detach().double()
        amount = torch.rand(wide.shape, generator=generator, dtype=torch.float64).to(wide.device) - 0.5
        unit = spacing(wide.nan_to_num(), dtype or value.dtype)
        return torch.where(wide.isfinite() & (wide != 0), wide + amount * units * unit, wide)

    return [one(value) for value in inputs]


def _judged(
    position: int, mine: Tensor, theirs: Tensor, center: Tensor, moved: Sequence[Tensor]
) -> LessPrecise | None:
    center, a, b = center.double(), mine.double(), theirs.double()
    known = center.isfinite() & a.isfinite() & b.isfinite()
    for run in moved:
        known &= run.isfinite()
    if not known.any():
        return None

    def rms(value: Tensor) -> float:
        return value[known].square().mean().sqrt().item()

    unit = spacing(center.nan_to_num(), mine.dtype)
    before, after = rms(a - center), rms(b - center)
    reach = max((rms(run.double() - center) for run in moved), default=0.0)
    floor = max(rms(unit) / 12**0.5, before, reach, torch.finfo(torch.float64).tiny)
    return LessPrecise(position, after / floor, before, after, after / max(unit[known].max().item(), 5e-324))
