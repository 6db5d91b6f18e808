"""Inputs at which a computed value equals the number that it is compared with: a norm that is the radius.

If the value is below on some inputs and above on others, it is equal on inputs between. Bisection finds these
(as far as rounding allows, and not where it jumps over the number). Both graphs then get the number itself in
its place, since both compare the same value there.

A number that is far smaller than the value, such as the least norm to divide by, takes small inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.same_function import Rewriting
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.free_values import packet
from fxpasses.checking.execution.inputs import made_up, scaled
from fxpasses.checking.execution.interpret import ExactRun, as_float64
from fxpasses.exact.same_values import MASK
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.rewriting import value_of

aten = torch.ops.aten

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.mul}
_STEPS = 48
_TOLERANCE = 1e-9
_SCALES = (1.0, 2.0**3, 2.0**-3, 1.0)
_SMALL = 2.0**-12
"""From which share of a value on a number that it is compared with is not met by chance."""
_MAX_TRIED, _POLE = 4, 4.0
"""How many elements to try between two inputs. One that is this many times as far off has a pole."""


def crossed_values(
    rewriting: Rewriting, window: Window, mine: Sequence[fx.Node], theirs: Sequence[fx.Node]
) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Yield values at which a value that both sides of a window compare is what it is compared with.

    Args:
        rewriting: the graphs.
        window: what changed.
        mine: the comparing calls of its first side that its second side does not make.
        theirs: likewise, of the second one.

    Returns:
        Names of that value before and after, and values of it and of the inputs of the graph, by name.
    """
    mine, theirs = ([call for call in calls if _is_comparison(call)] for calls in (mine, theirs))
    old, new = ({given for call in calls for given in _float_arguments(call)} for calls in (mine, theirs))
    if len(old) != 1 or len(new) != 1:
        return
    (before,), (after,) = old, new
    # Inputs of a window have one name on both sides. Inputs of the graph take the number themselves.
    is_computed = {n.name for n in rewriting.before.graph.nodes if n.op == "call_function"}
    equal = {after.name: after.name} if after.op == "placeholder" else rewriting.equal_values(window)
    if before.name not in is_computed or equal.get(after.name) != before.name:
        return
    written = (n for call in (*mine, *theirs) for n in (*call.args, *call.kwargs.values()))
    for number in dict.fromkeys(float(n) for n in written if isinstance(n, (int, float))):
        values = _solve_for_number(rewriting, before.name, number)
        if values is not None:
            yield before.name, after.name, values


def small_inputs(
    rewriting: Rewriting, mine: Sequence[fx.Node], theirs: Sequence[fx.Node]
) -> Iterator[list[Any]]:
    """Yield inputs so small that a number which only one side chooses decides, as in ``max(norm, 1e-12)``.

    Args:
        rewriting: the graphs.
        mine: the choosing calls of the graph before that the graph after does not make.
        theirs: likewise, of the graph after.
    """
    shares: dict[float, str] = {}
    for call in (*mine, *theirs):
        held = (*call.args, *call.kwargs.values())
        written = [abs(n) for n in held if isinstance(n, (int, float)) and type(n) is not bool and n]
        for given in _float_arguments(call):
            value = rewriting.values.get(given.name)
            size = (
                float(computable(value).abs().max()) if isinstance(value, Tensor) and value.numel() else 0.0
            )
            shares |= {number / size: given.name for number in written if number < _SMALL * size < math.inf}
    for share in sorted(filter(None, shares))[-1:]:
        nodes = rewriting.before.graph.nodes
        factors = _scaling_inputs(next(node for node in nodes if node.name == shares[share]))
        names = [node.name for node in rewriting.before.graph.find_nodes(op="placeholder")]
        for power in (1, 2):  # of the inputs in the value
            small = scaled(rewriting.inputs, 2.0 ** round(math.log2(share) / power))
            pairs = zip(names, small, rewriting.inputs, strict=True)
            yield [new if name in factors else old for name, new, old in pairs]


def _scaling_inputs(node: fx.Node) -> set[str]:
    """The inputs that scale a value where nothing else does: all summands, but one factor of a product."""
    found, queue, seen = set(), [node], {node}
    while queue:
        value = queue.pop()
        if value.op == "placeholder":
            found.add(value.name)
        given = [n for n in value.args if isinstance(n, fx.Node)]
        if packet(value) in _PRODUCTS and len(given) > 1:
            del given[packet(value) in (aten.addmm, aten.baddbmm)]
        elif value.op == "call_function":
            given = value.all_input_nodes
        given = [n for n in given if n not in seen]
        seen.update(given)
        queue += given
    return found


def _is_comparison(node: fx.Node) -> bool:
    """Whether a call jumps. A kink, as of a clamp, takes the same value from both sides."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _float_arguments(node: fx.Node) -> list[fx.Node]:
    floats = (n for n in node.all_input_nodes if isinstance(value_of(n), Tensor))
    return [n for n in floats if value_of(n).is_floating_point()]


def _is_movable(value: Any) -> bool:
    """Whether an input may take any value between two: floats that are not a mask."""
    return isinstance(value, Tensor) and value.dtype is torch.float64 and bool((value.abs() < MASK).all())


def _solve_for_number(rewriting: Rewriting, name: str, number: float) -> dict[str, Tensor] | None:
    """Inputs on which an element of a value is a number, with that value; ``None`` if none are found."""
    names = [node.name for node in rewriting.before.graph.find_nodes(op="placeholder")]
    start = [as_float64(value) for value in rewriting.inputs]
    moved = [i for i, value in enumerate(start) if _is_movable(value)]
    generator = torch.Generator().manual_seed(len(names))
    others = [scaled(made_up(start, "random", generator), scale) for scale in _SCALES]

    def at(end: Sequence[Any], part: float) -> tuple[list[Any], Tensor | None]:
        inputs = [v + part * (end[i] - v) if i in moved else v for i, v in enumerate(start)]
        run = ExactRun(rewriting.before, keep=True)
        found = run.values.get(name) if run.results(inputs) is not None else None
        return inputs, found if isinstance(found, Tensor) and found.dtype is torch.float64 else None

    _, first = at(start, 0.0)
    for end in others:
        _, last = at(end, 1.0)
        if first is None or last is None or last.shape != first.shape:
            return None
        crosses = ((first - number) * (last - number) < 0).flatten().nonzero().flatten()
        for element in crosses[:_MAX_TRIED]:
            index = torch.unravel_index(element, first.shape)
            ends = float(first[index]) - number, float(last[index]) - number
            for inputs, value in _bisect_crossing(functools.partial(at, end), index, number, *ends):
                value = value.clone()
                value[index] = number
                return {**{names[i]: inputs[i] for i in moved}, name: value}
    return None


def _bisect_crossing(
    at: Callable[[float], tuple[list[Any], Tensor | None]],
    index: tuple[Tensor, ...],
    number: float,
    from_low: float,
    from_high: float,
) -> Iterator[tuple[list[Any], Tensor]]:
    """Yield inputs, with the value on them, on which an element of it nearly equals a number.

    Args:
        at: returns both for a part of the way from one set of inputs to another.
        index: of the element.
        number: the wanted number.
        from_low: how far it is off at the beginning.
        from_high: how far it is off at the end, on the other side.
    """
    low, high, farthest = 0.0, 1.0, _POLE * max(abs(from_low), abs(from_high))
    for step in range(_STEPS):
        # Alternate between linear interpolation and halving.
        share = from_low / (from_low - from_high) if step % 2 else 0.5
        part = low + share * (high - low)
        inputs, value = at(part)
        difference = math.nan if value is None else float(value[index]) - number
        if value is not None and abs(difference) <= _TOLERANCE * max(1.0, abs(number)):
            yield inputs, value
            return
        if not abs(difference) <= farthest:  # it changes sides at infinity, or has no value
            return
        if (difference < 0) is (from_low < 0):
            low, from_low = part, difference
        else:
            high, from_high = part, difference
