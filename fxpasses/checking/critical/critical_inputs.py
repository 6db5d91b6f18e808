"""Inputs made for one rewrite: integers, indices and sizes that expose what it changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.same_function import Rewriting
from fxpasses.checking.comparison.windows import changed_values
from fxpasses.checking.critical.compared_numbers import (
    MAX_TURNS,
    draw_around_numbers,
    numbers_in_calls,
    window_calls,
)
from fxpasses.checking.critical.critical_values import INTEGERS, extend_to_free_inputs, where_different
from fxpasses.checking.critical.free_values import ancestors, packet
from fxpasses.checking.execution.inputs import cloned, in_memory
from fxpasses.checking.execution.interpret import Run
from fxpasses.exact.bounds import accepts_input
from fxpasses.exact.samples import is_mask, is_ordered
from fxpasses.graphs.rewriting import value_of

_SIZES_BEYOND_DTYPE = {
    torch.int8: 2**8 + 44,
    torch.uint8: 2**9 + 44,
    torch.bfloat16: 2**9 + 44,
    torch.float16: 2**12 + 300,
}
"""Sizes at which a dtype can no longer represent all positions, nor counts of about half of them."""
_INEXACT = {
    kind: (2**digits + 1, 2**digits - 1, 2**digits + 3, (math.isqrt(2**digits) // 2 * 2 + 2) ** 2 - 1)
    for kind, digits in ((torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24), (torch.float64, 53))
}
"""Integers at which a float dtype stops representing all of them. The last one is rounded to a square."""
aten, prims = torch.ops.aten, torch.ops.prims
_POSITIONS = {aten.arange, prims.iota}
_CASTS = {aten._to_copy, prims.convert_element_type}
_SIZES, _MAX_SIZES = (16, 2048), 3
_MAX_ALONE = 32
"""How many integers to try in an input that holds one: a counter of steps."""


def critical_integers(rewriting: Rewriting, generator: torch.Generator) -> Iterator[list[Any]]:
    """Yield inputs with integers, in one tensor at a time, that changed calls on integers hold.

    Sums, products and quotients of these count, too, and the integers next to all of them.

    Args:
        rewriting: the graphs, and inputs.
        generator: of random numbers.
    """
    deciding = _inputs_of(rewriting.before, rewriting.changed[0]) | _inputs_of(
        rewriting.after, rewriting.changed[1]
    )
    taken = [i for i, v in enumerate(rewriting.inputs) if i in deciding and _is_integer(v)]
    numbers: dict[int, None] = {}
    for window in rewriting.windows or () if taken else ():
        values = (*window.inputs, *map(value_of, window_calls(window)))
        if any(isinstance(v, Tensor) and v.dtype in INTEGERS for v in values):
            held = numbers_in_calls(extend_to_free_inputs(rewriting, window))
            numbers |= {int(number): None for number in held if number >= 0 and number.is_integer()}
    numbers |= {beside: None for n in list(numbers) for beside in (n - 1, n + 1) if beside >= 0}
    # Together they matter where all occur: positions are compared with some.
    inexact = [n for kind in _counting_dtypes(rewriting) for n in _INEXACT[kind]] if taken else []
    for at in taken if numbers or inexact else ():
        shape = in_memory(rewriting.inputs[at]).shape
        largest = torch.iinfo(rewriting.inputs[at].dtype).max
        known = torch.tensor([*(n for n in inexact if n <= largest), *numbers], dtype=torch.int64)
        most = max(MAX_TURNS, _MAX_ALONE // shape.numel())
        for turn in range(min(most, -(-2 * len(known) // shape.numel()))):
            order = torch.randint(len(known), (shape.numel(),), generator=generator)
            order[: len(known)] = torch.arange(shape.numel())[: len(known)] + turn * shape.numel()
            inputs = cloned(rewriting.inputs)
            made = known[order % len(known)]
            if is_ordered(rewriting.inputs[at]):
                made = made.sort().values
                if not accepts_input(rewriting.before, inputs, at, made):
                    continue
            in_memory(inputs[at]).copy_(made.view(shape))
            yield inputs
            beside = draw_around_numbers(rewriting.before, inputs, turn)
            if beside is not None:
                yield [*beside[:at], inputs[at], *beside[at + 1 :]]


def _inputs_of(gm: fx.GraphModule, names: Collection[str]) -> set[int]:
    """The positions of the inputs on which some calls of a graph depend."""
    above: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.name in names or not above.isdisjoint(node.users):
            above.add(node)
    return {at for at, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in above}


def _is_integer(value: Any) -> bool:
    """Whether a tensor holds integers other than truth values or offsets, which begin at zero."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS or not value.numel():
        return False
    return not is_mask(value) and not (is_ordered(value) and bool(value[0] == 0))


def _counting_dtypes(rewriting: Rewriting) -> list[torch.dtype]:
    """The float dtypes in which new calls of the graph after hold integers or positions."""
    found: dict[torch.dtype, None] = {}
    for node in rewriting.after.graph.nodes:
        kind, *given = _value_and_first_input(node)
        is_made = isinstance(kind, Tensor) and kind.dtype in _INEXACT and node.name in rewriting.changed[1]
        if is_made and (_holds_integers(node.all_input_nodes[0]) if given else packet(node) in _POSITIONS):
            found[kind.dtype] = None
    return list(found)


def _holds_integers(node: fx.Node) -> bool:
    """Whether a tensor is integers, or cast from integers."""
    while packet(node) in _CASTS:
        node = node.all_input_nodes[0]
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype in INTEGERS


def critical_rows(rewriting: Rewriting, generator: torch.Generator) -> Iterator[list[Any]]:
    """Yield inputs whose indices select rows that a pass changed.

    Args:
        rewriting: the graphs, and inputs.
        generator: of random numbers.
    """
    indices = [i for i, v in enumerate(rewriting.inputs) if isinstance(v, Tensor) and v.dtype in INTEGERS]
    if not indices:
        return
    for mine, theirs in _changed_float_arguments(rewriting):
        wrong = where_different(mine, theirs)
        for at, dim in itertools.product(indices, range(mine.dim()) if bool(wrong.any()) else ()):
            rows = wrong.nonzero()[:, dim].cpu()
            inputs = cloned(rewriting.inputs)
            if inputs[at].numel():
                own = in_memory(inputs[at])
                own.copy_(rows[torch.randint(len(rows), own.shape, generator=generator)])
                yield inputs


def _changed_float_arguments(rewriting: Rewriting) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float arguments, before and after, of calls that also take integers.

    They are changed, or computed from changed constants alone.
    """
    theirs = {node.name: node for node in rewriting.before.graph.nodes}
    values: list[dict[str, Any]] = []
    for user in rewriting.after.graph.nodes:
        other = theirs.get(user.name)
        kinds = [v.dtype for v in map(value_of, user.all_input_nodes) if isinstance(v, Tensor)]
        if other is None or other.target != user.target or not set(INTEGERS) & set(kinds):
            continue
        for old, new in zip(other.all_input_nodes, user.all_input_nodes, strict=False):
            made_of = {node.name for node in (new, *(() if _depends_on_inputs(new) else ancestors(new)))}
            if old.name not in rewriting.changed[0] and not made_of & rewriting.changed[1]:
                continue
            if not values:
                values = [rewriting.values, _all_values(rewriting.after, rewriting.inputs)]
            a, b = values[0].get(old.name), values[1].get(new.name)
            floats = [v for v in (a, b) if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
            if len(floats) == 2 and floats[0].shape == floats[1].shape:
                yield floats[0], floats[1]


def _depends_on_inputs(node: fx.Node) -> bool:
    return any(value.op == "placeholder" for value in (node, *ancestors(node)))


def _all_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    run = Run(gm, keep=True)
    run(cloned(inputs))
    return run.values


def critical_sizes(before: fx.GraphModule, after: fx.GraphModule) -> list[int]:
    """Return sizes just beyond a number in a changed call, or beyond the integers of a dtype.

    That is a dtype to which a pass casts, or in which it counts.
    """
    found: dict[int, None] = {}
    for gm, names in zip((before, after), changed_values(before, after), strict=True):
        for node in gm.graph.nodes:
            if node.name not in names or node.op != "call_function":
                continue
            kind, *given = (v.dtype if isinstance(v, Tensor) else None for v in _value_and_first_input(node))
            if gm is after and given != [kind]:
                found |= {size: None for dtype, size in _SIZES_BEYOND_DTYPE.items() if kind is dtype}
            numbers = [abs(n) for n in node.args if isinstance(n, (int, float)) and math.isfinite(n)]
            found |= {int(n) + 2: None for n in numbers if _SIZES[0] <= n <= _SIZES[1]}
    return list(found)[:_MAX_SIZES]


def _value_and_first_input(node: fx.Node) -> list[Any]:
    """The value of a call, and that of its first tensor argument; none if it is computed from sizes alone."""
    given = [v for v in map(value_of, node.all_input_nodes) if isinstance(v, Tensor)]
    return [value_of(node), *given[:1]]
