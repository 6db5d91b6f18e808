"""Constants that a pass computed: a low-precision tensor stands for the number that it was rounded from.

Such a rewrite is a slightly different function. It may be off by what half a unit in the last place of those
constants does to each result, not more: their elements are moved by just that much, randomly up or down,
often enough to see the whole range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.rounding import spacing
from fxpasses.checking.comparison.windows import changed_nodes
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.checking.execution.interpret import RUN_ERRORS, UNINITIALIZED, ExactRun, Run
from fxpasses.exact.same_values import DRIFT
from fxpasses.exact.samples import sample_input
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.rewriting import constants_of, copy_graph, same_constant

_SEED = 20
_RUNS = 32
_MAX_DISTINCT = 4
"""Results that take at most this many values depend on one or two elements, and their range is exact."""
_MAX_RMS_MULTIPLE = 4.0
"""Bound on other sums of independent amounts, in root mean squares: 7 standard deviations of rounding."""
_CHECKED_ELEMENTS = 4096
_MAX_SINGLE_ELEMENTS = 32
"""Constants with at most this many elements are moved one by one, to find what makes the graphs agree."""
_SCALES = tuple(2.0**power for power in range(0, 41, 4))
"""If the given inputs show nothing, larger ones do: a bound, or the saturated part of an activation."""
_SAMPLES = 4
_SLACK = 0.05
"""What curvature over half a unit may add, and computing the constant in double precision."""


def explained_by_constants(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Any],
    is_same: Callable[[fx.GraphModule, fx.GraphModule], bool],
) -> bool:
    """Whether two functions differ by no more than the rounding of constants that only the second one holds.

    What both compute from no input, with the same bits, counts as one constant, however often it was rounded.

    Args:
        before: a graph.
        after: what a pass made of it.
        inputs: of both.
        is_same: whether two graphs of these inputs are proved to be the same function.
    """
    changed = frozenset().union(*changed_nodes(before, after))
    before, after, shared = _with_equal_constants(before, after)
    if shared & changed and is_same(before, after):
        return True
    held = constants_of(before)
    names = [
        name
        for name, value in constants_of(after).items()
        if value.is_floating_point() and not (name in held and same_constant(held[name], value))
    ]
    if not names:
        return False
    generator = torch.Generator().manual_seed(_SEED)
    for scale in (None, *_SCALES):
        given = inputs if scale is None else [_sample_like(value, generator, scale) for value in inputs]
        mine, theirs = (ExactRun(gm).results(given) for gm in (before, after))
        gaps = _float_differences(mine, theirs) if mine is not None and theirs is not None else None
        if gaps is None or theirs is None:
            return scale is not None
        if any(gap is not None for gap in gaps):
            return _is_explained_by_rounding(after, names, given, theirs, gaps) and _is_solvable_by_rounding(
                before, after, names, given
            )
    return True


def _float_differences(mine: Sequence[Any], theirs: Sequence[Any]) -> list[Tensor | None] | None:
    """The differences of float results, ``None`` for equal ones; ``None`` if something else differs."""
    gaps: list[Tensor | None] = []
    for a, b in zip(mine, theirs, strict=True):
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        if tensors and a.is_floating_point() and a.shape == b.shape:
            gap = (a - b).nan_to_num(0.0, 0.0, 0.0)
            largest = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
            gap[gap.abs() <= DRIFT * largest] = (
                0.0  # float64 rounding: what the constants do may be even less
            )
            gaps.append(gap if gap.any() else None)
        elif torch.equal(a, b) if tensors else type(a) is type(b) and a == b:
            gaps.append(None)
        else:
            return None
    return gaps


def _with_equal_constants(
    before: fx.GraphModule, after: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule, set[str]]:
    """Copy both graphs, with equal values that they compute from no input as shared constants.

    Also return the names of everything computed from no input.
    """
    sides = [(copy_graph(gm, constants=True), constant_float_values(gm)) for gm in (before, after)]
    known = list(sides[1][1].values())
    shared: list[Tensor] = []
    for value in sides[0][1].values():
        if any(same_constant(value, other) for other in known):
            shared.append(value)
    for gm, values in sides:
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, value in values.items():
            number = next((i for i, other in enumerate(shared) if same_constant(value, other)), None)
            if number is None:
                continue
            node = nodes[name]
            gm.register_buffer(f"_equal_{number}", value.detach().clone(), persistent=False)
            with gm.graph.inserting_before(node):
                held = gm.graph.get_attr(f"_equal_{number}")
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return sides[0][0], sides[1][0], {name for _, values in sides for name in values} if shared else set()


def constant_float_values(gm: fx.GraphModule) -> dict[str, Tensor]:
    """Return the float values that depend on no input, by name."""
    free: set[fx.Node] = set()
    for node in gm.graph.nodes:
        pure = node.op == "call_function" and not (
            uses_rng(node) or is_mutating(node) or node.target in UNINITIALIZED
        )
        if node.op == "get_attr" or (pure and all(value in free for value in node.all_input_nodes)):
            free.add(node)
    calls = {node.name for node in free if node.op == "call_function"}
    try:
        values = Run(gm).run_calls(calls, {}, _SEED) if calls else {}
    except (Unsupported, *RUN_ERRORS):
        values = {}
    held = constants_of(gm)
    values |= {node.name: held.get(str(node.target)) for node in free if node.op == "get_attr"}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _is_explained_by_rounding(
    gm: fx.GraphModule,
    names: Sequence[str],
    inputs: Sequence[Any],
    results: Sequence[Any],
    gaps: Sequence[Tensor | None],
) -> bool:
    """Whether the rounding of the constants explains each gap."""

    def moved(seed: int) -> list[Any] | None:
        return ExactRun(_with_moved_constants(gm, names, seed)).results(inputs)

    squares: list[Any] = [None if gap is None else torch.zeros_like(gap) for gap in gaps]
    for seed in range(_RUNS):
        run = moved(seed)
        if run is None:
            return False
        for position, gap in enumerate(gaps):
            if gap is not None:
                squares[position] += (run[position] - results[position]).nan_to_num(0.0).square() / _RUNS
    worst: dict[int, Tensor] = {}
    for position, gap in enumerate(gaps):
        if gap is not None:
            times = (gap.abs() / squares[position].sqrt()).nan_to_num(0.0).flatten()
            if float(times.max()) > _MAX_RMS_MULTIPLE:
                return False
            worst[position] = times.topk(min(_CHECKED_ELEMENTS, times.numel())).indices
    seen: dict[int, list[Tensor]] = {position: [] for position in worst}
    for seed in range(_RUNS):
        run = moved(seed) or []
        for position, at in worst.items():
            seen[position].append((run[position] - results[position]).nan_to_num(0.0).flatten()[at])
    return all(
        _is_in_range(torch.stack(seen[position]), gaps[position].flatten()[at])  # type: ignore[union-attr]
        for position, at in worst.items()
    )


def _is_solvable_by_rounding(
    before: fx.GraphModule, after: fx.GraphModule, names: Sequence[str], inputs: Sequence[Any]
) -> bool:
    """Whether moving elements of constants by up to half a unit makes the graphs agree, if they are few."""
    held = constants_of(after)
    steps = [(name, at, up) for name in names for at in range(held[name].numel()) for up in (False, True)]
    if len(steps) > 2 * _MAX_SINGLE_ELEMENTS:
        return True
    generator = torch.Generator().manual_seed(_SEED)
    rows: list[Tensor] = []
    wanted: list[Tensor] = []
    for number in range(_SAMPLES):
        given = list(inputs) if number == 0 else [_sample_like(value, generator) for value in inputs]
        mine, theirs = (_flatten_floats(ExactRun(gm).results(given)) for gm in (before, after))
        if mine is None or theirs is None or mine.shape != theirs.shape:
            continue
        moved = [
            _flatten_floats(ExactRun(_with_moved_element(after, *step)).results(given)) for step in steps
        ]
        if any(run is None for run in moved):
            continue
        rows.append(torch.stack([run - theirs for run in moved], 1))  # type: ignore[operator]
        wanted.append(mine - theirs)
    if not rows:
        return True
    # Solve for a part from 0 to 1 of a step up or down. Both are one unknown, since most are of equal length.
    reach, gap = torch.cat(rows), torch.cat(wanted)
    known = reach.isfinite().all(1) & gap.isfinite()
    ups, downs = reach[known][:, 1::2], reach[known][:, 0::2]
    gap = gap[known]
    seen = ups.abs().amax(0) > 0 if len(ups) else torch.zeros(len(steps) // 2, dtype=torch.bool)
    if not seen.any():
        return True
    ups, downs = ups[:, seen], downs[:, seen]
    amount = torch.linalg.lstsq(ups, gap.unsqueeze(1), driver="gelsd").solution[:, 0]
    short = downs.norm(dim=0) / ups.norm(dim=0)  # at a power of two, the step towards zero is half as long
    return bool(((amount <= 1 + _SLACK) & (amount >= -short - _SLACK)).all())


def _sample_like(value: Any, generator: torch.Generator, scale: float = 1.0) -> Any:
    if not isinstance(value, Tensor):
        return value
    return sample_input(value.detach().cpu(), "random", generator, scale).to(value.device, value.dtype)


def _flatten_floats(results: Sequence[Any] | None) -> Tensor | None:
    """Concatenate the float results into one vector."""
    if results is None:
        return None
    floats = [v.double().flatten() for v in results if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat(floats) if floats else None


def _with_moved_element(gm: fx.GraphModule, name: str, at: int, up: bool) -> fx.GraphModule:
    """The graph with one element of a constant halfway to its neighbor."""
    value = constants_of(gm)[name].detach().cpu()
    amounts = torch.zeros(value.numel(), dtype=torch.float64)
    amounts[at] = _half_spacing(value.double().flatten()[at], value.dtype, torch.tensor(up))
    return _with_constant(copy_graph(gm, constants=True), name, value.double() + amounts.view(value.shape))


def _is_in_range(seen: Tensor, gap: Tensor) -> bool:
    """Whether gaps lie in the range of the observed values, where these are few."""
    ordered = seen.sort(0).values
    size = seen.abs().max(0).values
    few = (ordered.diff(dim=0) > 1e-6 * size).sum(0) < _MAX_DISTINCT
    slack = 1e-6 * size
    inside = (gap >= ordered[0] - slack) & (gap <= ordered[-1] + slack)
    return bool((inside | ~few | (gap == 0)).all())


def _with_moved_constants(gm: fx.GraphModule, names: Sequence[str], seed: int) -> fx.GraphModule:
    """The graph with each element of some constants halfway to one of its neighbors."""
    generator = torch.Generator().manual_seed(seed)
    copy = copy_graph(gm, constants=True)
    for name in names:
        value = constants_of(gm)[name].detach().cpu()
        up = torch.rand(value.shape, generator=generator) < 0.5
        copy = _with_constant(copy, name, value.double() + _half_spacing(value.double(), value.dtype, up))
    return copy


def _half_spacing(value: Tensor, dtype: torch.dtype, up: Tensor) -> Tensor:
    """The distance to the midpoint between each value and the next one of a dtype, up or down."""
    half = spacing(value.nan_to_num(), dtype) / 2
    mantissa, _ = torch.frexp(value.abs())
    half = torch.where(
        (mantissa == 0.5) & (up != (value > 0)), half / 2, half
    )  # the unit below a power of two
    return torch.where(up, half, -half)


def _with_constant(gm: fx.GraphModule, name: str, value: Tensor) -> fx.GraphModule:
    device = constants_of(gm)[name].device
    parent, _, last = name.rpartition(".")
    module = gm.get_submodule(parent)
    delattr(module, last)
    setattr(module, last, value.to(device))
    return gm
