"""Values so large that a graph only just stands them, wherever in it a pass changed something."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.free_values import Following, origin, sources
from fxpasses.checking.given_values import Found, free_inputs, input_names, is_any_float, with_given
from fxpasses.checking.inputs import Unsupported, cloned
from fxpasses.checking.interpret import CANNOT_RUN, Run, as_float64, as_recorded_dtype
from fxpasses.checking.same_function import Rewriting
from fxpasses.checking.windows import Window
from fxpasses.graphs.numbers import computable

WITHIN = 3 / 5
"""So far on the way to the first overflow, in powers of two: a right rewrite has products and sums on its way that are larger than its result."""
_MODERATE = 8
"""A power of two by which most of a graph may be multiplied: where it stands less than a window does."""
_MOST_DOUBLINGS = 48
_SEED = 20


def largest_power(is_finite: Callable[[int], bool]) -> int:
    """The largest power of two, from 0 on, by which values can be multiplied until something is not finite.

    >>> largest_power(lambda power: 2.0**power < 1000)
    9
    """
    low, high = 0, _MOST_DOUBLINGS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_finite(middle) else (low, middle - 1)
    return low


def stays_finite(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph can be run on some inputs, and all of its results, and inputs after the run, are finite."""
    copies = cloned(inputs)
    try:
        results = [*Run(gm)(copies, _SEED), *copies]
    except (Unsupported, *CANNOT_RUN):
        return False
    floating = (v for v in results if isinstance(v, Tensor) and v.is_floating_point())
    return all(bool(computable(v).isfinite().all()) for v in floating)


def overflows(rewriting: Rewriting, window: Window, only_given: bool) -> Iterator[Found]:
    """Values of what the inputs of a window follow that the graph before stands, and the graph after does not.

    Args:
        rewriting: the graphs, and inputs.
        window: of what changed.
        only_given: whether only inputs of the graph may be any number.
    """
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    names = input_names(window)
    held = dict(zip(names, map(as_float64, window.inputs), strict=True))
    free = {nodes[name]: None for name in free_inputs(rewriting, held, only_given)}
    for name in names:
        if is_any_float(held[name]) and nodes[name] not in free:
            free |= dict.fromkeys(itertools.islice(sources(nodes[name], only_given), 1))
    given = [node for node in free if node.name in others and not origin(node) & free.keys()]
    for several in dict.fromkeys([tuple(given), *((node,) for node in given)]):
        following = Following(rewriting.before, several, names, rewriting.values)
        for chosen in _parts(following.start.values()) if following.is_apart else ():
            taken = functools.partial(_larger, window, held, following, chosen)
            largest = int(WITHIN * largest_power(functools.partial(_stands, window.before, taken)))
            for power in dict.fromkeys((largest, min(largest, _MODERATE))):
                if power < 1 or _stands(window.after, taken, power):
                    continue
                values = {node.name: following.at(chosen(power))[node.name] for node in several}
                found = with_given(rewriting, values, f"some of them 2**{power} times as large")
                if stays_finite(found.before, found.inputs) and not stays_finite(found.after, found.inputs):
                    yield found


def _stands(gm: fx.GraphModule, taken: Callable[[int], list[Any]], power: int) -> bool:
    try:
        return stays_finite(gm, taken(power))
    except CANNOT_RUN:
        return False


def _larger(
    window: Window, held: Mapping[str, Any], following: Following, chosen: Callable[[int], Any], power: int
) -> list[Any]:
    values = {**held, **following.at(chosen(power))}
    return [as_recorded_dtype(values[name], v) for name, v in zip(held, window.inputs, strict=True)]


def _parts(start: Collection[Tensor]) -> Iterator[Callable[[int], Any]]:
    """Factors by powers of two: of all elements, and, of a single value, of some elements alone, which are positive then."""
    yield lambda power: 2.0**power
    for value in start if len(start) == 1 else ():
        flat, count = torch.arange(value.numel(), device=value.device).view(value.shape), value.numel()
        sign = torch.where(value < 0, -1.0, 1.0)
        columns = value.shape[-1] if value.dim() else 1
        for at in (flat % (columns + 1) == 0, *(flat == quarter * count // 4 for quarter in (1, 2, 3))):
            yield functools.partial(_at, at, sign)


def _at(at: Tensor, sign: Tensor, power: int) -> Tensor:
    return torch.where(at, sign * 2.0**power, 1.0)
