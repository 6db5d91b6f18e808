"""Values so large that a graph only just stays finite, wherever in it a pass changed something."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.same_function import Rewriting
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.free_values import DependentValues, ancestors, nearest_free_values, packet
from fxpasses.checking.critical.given_values import (
    Counterexample,
    free_inputs,
    input_names,
    is_float64_tensor,
    with_values_as_inputs,
)
from fxpasses.checking.execution.inputs import Unsupported, cloned
from fxpasses.checking.execution.interpret import RUN_ERRORS, Run, as_float64, as_recorded_dtype
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.rewriting import value_of

aten = torch.ops.aten

OVERFLOW_FRACTION = 3 / 5
"""Part of the way to the first overflow, in powers of two: intermediate values may exceed results."""
_MODERATE = 8
"""Power of two by which most of a graph can be scaled, if it overflows before a window does."""
_MAX_DOUBLINGS = 48
_NARROW = 2.0**16
"""Dtypes with a smaller maximum are tested up to it."""
_SLACK = 2.0
"""A correct rewrite adds in another order: its intermediate values may be this many times as large."""
_HEADROOM = 16.0
"""Factor by which a program's values stay below a dtype's maximum.

Closer to it, a sum of few terms may overflow in one order, or before scaling, and not in another.
"""
_DRAWS = 3
"""All of this many draws must overflow: in one, terms may cancel that another order adds up later."""
_SEED = 20
_SUMS_OF_TWO = {aten.add, aten.sub}
_SUMS_AND_PRODUCTS = {
    *_SUMS_OF_TWO,
    *(aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.linear, aten.matmul),
    *(aten.mul, aten.sum, aten.mean, aten.cumsum, aten.square),
}


def largest_power(is_finite: Callable[[int], bool]) -> int:
    """Find the largest power of two, from 0 on, by which values can be scaled before something overflows.

    >>> largest_power(lambda power: 2.0**power < 1000)
    9
    """
    low, high = 0, _MAX_DOUBLINGS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_finite(middle) else (low, middle - 1)
    return low


def stays_finite(gm: fx.GraphModule, inputs: Sequence[Any], inside: bool = False) -> bool:
    """Whether a graph runs, and its results, and what it writes to finite inputs, are finite.

    Args:
        gm: the graph.
        inputs: of it.
        inside: whether sums and products of finite numbers inside must be finite, too: ``tanh`` hides that
            one is not, and a correct rewrite may add it up from infinities of both signs. An infinite
            exponential stands for its limit.
    """
    copies, run = cloned(inputs), Run(gm, keep=inside)
    try:
        results = run(copies, _SEED)
    except (Unsupported, *RUN_ERRORS):
        return False
    results += [after for value, after in zip(inputs, copies, strict=True) if _is_finite(value)]
    return all(map(_is_finite, results)) and (not inside or next(_overflowing(gm, run), None) is None)


def _overflowing(gm: fx.GraphModule, run: Run) -> Iterator[fx.Node]:
    """Yield the sums and products of a graph that are not finite though all their arguments are."""
    for node in gm.graph.nodes:
        is_one = packet(node) in _SUMS_AND_PRODUCTS and not _is_finite(run.values.get(node.name))
        if is_one and all(_is_finite(run.values.get(given.name)) for given in node.all_input_nodes):
            yield node


def _is_finite(value: Any, times: float = 1.0) -> bool:
    """Whether a value has no infinity or NaN, even if scaled by ``times``. Only float tensors may."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((computable(value).abs() <= torch.finfo(value.dtype).max / times).all())


def overflows(rewriting: Rewriting, window: Window, only_graph_inputs: bool) -> Iterator[Counterexample]:
    """Yield values of what window inputs follow on which only the graph after overflows.

    Args:
        rewriting: the graphs, and inputs.
        window: of what changed.
        only_graph_inputs: whether only inputs of the graph may be any number.
    """
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    names = input_names(window)
    held = dict(zip(names, map(as_float64, window.inputs), strict=True))
    free = {nodes[name]: None for name in free_inputs(rewriting, held, only_graph_inputs)}
    for name in names:
        if is_float64_tensor(held[name]) and nodes[name] not in free:
            free |= dict.fromkeys(itertools.islice(nearest_free_values(nodes[name], only_graph_inputs), 1))
    given = [node for node in free if node.name in others and not ancestors(node) & free.keys()]
    for several in dict.fromkeys([tuple(given), *((node,) for node in given)]) if given else ():
        dependents = DependentValues(rewriting.before, several, names, rewriting.values)
        for chosen in _scale_patterns(dependents.start.values()) if dependents.is_independent else ():
            taken = functools.partial(_scaled_inputs, window, held, dependents, chosen)
            if _is_finite_at(window.after, taken, int(OVERFLOW_FRACTION * _MAX_DOUBLINGS)):
                continue  # so do all smaller powers
            largest = int(
                OVERFLOW_FRACTION
                * largest_power(functools.partial(_is_finite_at, window.before, taken, inside=True))
            )
            for power in dict.fromkeys((largest, min(largest, _MODERATE))):
                if power < 1 or _is_finite_at(window.after, taken, power):
                    continue
                values = {node.name: dependents.at(chosen(power))[node.name] for node in several}
                found = with_values_as_inputs(rewriting, values, f"some of them 2**{power} times as large")
                if _only_after_overflows(found):
                    yield found
        if dependents.is_independent and has_narrow_dtype(window):
            yield from _near_dtype_max(rewriting, window, held, dependents)


def _only_after_overflows(found: Counterexample) -> bool:
    return stays_finite(found.before, found.inputs) and not stays_finite(found.after, found.inputs)


def has_narrow_dtype(window: Window) -> bool:
    """Whether a window computes in a dtype of small range such as float16."""
    nodes = [*window.before.graph.nodes, *window.after.graph.nodes]
    kinds = {v.dtype for v in map(value_of, nodes) if isinstance(v, Tensor) and v.is_floating_point()}
    return any(torch.finfo(kind).max < _NARROW for kind in kinds)


def _near_dtype_max(
    rewriting: Rewriting, window: Window, held: Mapping[str, Any], dependents: DependentValues
) -> Iterator[Counterexample]:
    """Values whose product is half of what a window withstands before, if that overflows afterwards."""
    for positive in (False, True):
        shown = (
            _find_near_dtype_max(rewriting, window, held, dependents.with_random_start(seed, positive))
            for seed in range(_DRAWS)
        )
        found = list(itertools.takewhile(lambda one: one is not None, shown))
        if len(found) == _DRAWS and found[0] is not None:
            yield found[0]


def _find_near_dtype_max(
    rewriting: Rewriting, window: Window, held: Mapping[str, Any], drawn: DependentValues
) -> Counterexample | None:
    taken = functools.partial(_scaled_inputs, window, held, drawn, lambda power: 2.0**power)

    def has_headroom(power: float) -> bool:
        return all(_is_finite(value, _HEADROOM) for value in taken(power))

    def is_finite(power: float) -> bool:
        return _is_finite_at(window.before, taken, power, inside=True)

    slack = math.log2(_SLACK) / len(drawn.start)
    try:
        if stays_finite(window.after, taken(largest_power(has_headroom) + 1)):
            return None
        power = _largest_power_in_eighths(has_headroom)
        if not is_finite(power + slack):
            power = _largest_power_in_eighths(is_finite) - slack
        is_shown = power >= 0 and _overflows_by_far(window.after, taken(power))
    except RUN_ERRORS:
        return None
    if not is_shown:
        return None
    values = {name: value * 2.0**power for name, value in drawn.start.items()}
    found = with_values_as_inputs(rewriting, values, "nearly as large as the graph stands them")
    return found if _only_after_overflows(found) else None


def _largest_power_in_eighths(is_finite: Callable[[float], bool]) -> float:
    power = float(largest_power(is_finite))
    for part in (0.5, 0.25, 0.125):
        power += part * is_finite(power + part)
    return power


def _overflows_by_far(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph overflows, except in a sum of two numbers: one is at least half the maximum there."""
    run = Run(gm, keep=True)
    try:
        results = run(cloned(inputs), _SEED)
    except (Unsupported, *RUN_ERRORS):
        return False
    first = next(_overflowing(gm, run), None)
    return not all(map(_is_finite, results)) and (first is None or packet(first) not in _SUMS_OF_TWO)


def _is_finite_at(
    gm: fx.GraphModule, taken: Callable[[float], list[Any]], power: float, inside: bool = False
) -> bool:
    try:
        return stays_finite(gm, taken(power), inside)
    except RUN_ERRORS:
        return False


def _scaled_inputs(
    window: Window,
    held: Mapping[str, Any],
    dependents: DependentValues,
    chosen: Callable[[float], Any],
    power: float,
) -> list[Any]:
    values = {**held, **dependents.at(chosen(power))}
    return [as_recorded_dtype(values[name], v) for name, v in zip(held, window.inputs, strict=True)]


def _scale_patterns(start: Collection[Tensor]) -> Iterator[Callable[[float], Any]]:
    """Yield factors by powers of two: for all elements, and for some of a single value, made positive."""
    yield lambda power: 2.0**power
    for value in start if len(start) == 1 else ():
        flat, count = torch.arange(value.numel(), device=value.device).view(value.shape), value.numel()
        sign = torch.where(value < 0, -1.0, 1.0)
        columns = value.shape[-1] if value.dim() else 1
        for at in (flat % (columns + 1) == 0, *(flat == quarter * count // 4 for quarter in (1, 2, 3))):
            yield functools.partial(_scale_where, at, sign)


def _scale_where(at: Tensor, sign: Tensor, power: float) -> Tensor:
    return torch.where(at, sign * 2.0**power, 1.0)
