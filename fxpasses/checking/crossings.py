"""What a graph computes and compares with a number, at that number: a norm that is the radius, an overlap that is the threshold.

Where it lies below on some inputs and above on others, it is equal on inputs between: these are found by bisection (no further than rounding lets it
come, and nowhere where it jumps over the number). Both graphs then get the number itself in its place, since both compare the same value there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import made_up, scaled
from fxpasses.checking.interpret import ExactRun, as_float64
from fxpasses.checking.same_function import Rewriting
from fxpasses.checking.windows import Window
from fxpasses.exact.same_values import MASK
from fxpasses.graphs.rewriting import value_of

_STEPS = 48
_CLOSE = 1e-9
_SCALES = (1.0, 2.0**3, 2.0**-3)


def crossed_values(
    rewriting: Rewriting, window: Window, mine: Sequence[fx.Node], theirs: Sequence[fx.Node]
) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Values at which one that both sides of a window compare is what it is compared with.

    Args:
        rewriting: the graphs.
        window: what changed.
        mine: the calls of its first side that compare, and that its second side does not make.
        theirs: likewise, of the second one.

    Returns:
        Names of that value before and after, and values of it and of the inputs of the graph, by name.
    """
    mine, theirs = ([call for call in calls if _is_comparison(call)] for calls in (mine, theirs))
    old, new = ({given for call in calls for given in _compared(call)} for calls in (mine, theirs))
    if len(old) != 1 or len(new) != 1:
        return
    (before,), (after,) = old, new
    if before.op != "call_function" or rewriting.equal_values(window).get(after.name) != before.name:
        return
    written = (n for call in (*mine, *theirs) for n in (*call.args, *call.kwargs.values()))
    for number in dict.fromkeys(float(n) for n in written if isinstance(n, (int, float))):
        values = _reach(rewriting, before.name, number)
        if values is not None:
            yield before.name, after.name, values


def _is_comparison(node: fx.Node) -> bool:
    """Whether it jumps: what bends, as a clamp does, takes the same value from both sides."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _compared(node: fx.Node) -> list[fx.Node]:
    floats = (n for n in node.all_input_nodes if isinstance(value_of(n), Tensor))
    return [n for n in floats if value_of(n).is_floating_point()]


def _is_moved(value: Any) -> bool:
    """Whether an input may be any between two: floats, and no mask."""
    return isinstance(value, Tensor) and value.dtype is torch.float64 and bool((value.abs() < MASK).all())


def _reach(rewriting: Rewriting, name: str, number: float) -> dict[str, Tensor] | None:
    """Inputs on which an element of a value is a number, with that value; ``None`` where none are found."""
    names = [node.name for node in rewriting.before.graph.find_nodes(op="placeholder")]
    start = [as_float64(value) for value in rewriting.inputs]
    moved = [i for i, value in enumerate(start) if _is_moved(value)]
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
        crosses = ((first - number) * (last - number) < 0).flatten().nonzero()
        if not len(crosses):
            continue
        element = int(crosses[0])
        low, high = 0.0, 1.0
        from_low, from_high = (float(v.flatten()[element]) - number for v in (first, last))
        for step in range(_STEPS):
            # As if it were a line, and in halves.
            share = from_low / (from_low - from_high) if step % 2 else 0.5
            part = low + share * (high - low)
            inputs, value = at(end, part)
            if value is None:
                break
            apart = float(value.flatten()[element]) - number
            if abs(apart) <= _CLOSE * max(1.0, abs(number)):
                value = value.clone()
                value[torch.unravel_index(crosses[0, 0], value.shape)] = number
                return {**{names[i]: inputs[i] for i in moved}, name: value}
            if (apart < 0) is (from_low < 0):
                low, from_low = part, apart
            else:
                high, from_high = part, apart
    return None
