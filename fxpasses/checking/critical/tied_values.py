"""Ties of what is rounded or compared after scaling: ``(x / s).round()`` at ``x`` equal to ``1.5 * s``.

A call that only one side of a rewrite makes is followed back through sums, products and quotients to one free
input of the window. That input is solved for, with the other free inputs on its way at powers of two, and
matrices that it is multiplied with at the identity, so that nothing rounds. If a value is scaled by its own
largest elements, these stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.compared_numbers import MAX_TURNS, is_broadcastable
from fxpasses.checking.critical.free_values import ancestors, has_own_inputs, packet
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.graphs.rewriting import value_of

aten, prims = torch.ops.aten, torch.ops.prims

_TIES, _INTEGERS = (0.5, -0.5, 1.5, -1.5, 2.5, -2.5), (1.0, -1.0, 2.0, -2.0, 3.0)
_JUMPS = {aten.round: _TIES, **dict.fromkeys((aten.floor, aten.ceil, aten.trunc), _INTEGERS)}
_COMPARISONS = {aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne}
_COPY_OPS = {aten.clone, aten.alias, aten.detach, aten._to_copy, prims.convert_element_type}
_BINARY_OPS = {aten.add, aten.sub, aten.mul, aten.div}
_VIEW_OPS = {aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze}
_MATMULS = {aten.mm: (), aten.bmm: (), aten.addmm: (0,)}
"""Operators that multiply their last two arguments, and the positions of what they add."""
_LAYOUT_OPS = {aten.permute, aten.t, aten.transpose, aten.expand, *_VIEW_OPS, *_COPY_OPS}
_MAX_CALLS = 8


def tied_values(
    window: Window, given: Mapping[str, Any], free: Collection[str], chosen: Sequence[Sequence[fx.Node]]
) -> Iterator[dict[str, Tensor]]:
    """Yield values of free window inputs at which what a call rounds or compares is a tie.

    That is halfway between two integers, or equal to the number or the value that it is compared with.

    Args:
        window: what changed.
        given: its inputs, in float64, by name.
        free: those that may be any number.
        chosen: the calls of its two sides that the other side does not make.
    """
    for gm, calls in zip((window.before, window.after), chosen, strict=True):
        nodes = {node.name: node for node in gm.graph.nodes}
        jumps = [nodes[call.name] for call in calls if call.name in nodes and _jump_points(call)]
        pairs = [nodes[call.name] for call in calls if call.name in nodes and _compares_values(call)]
        run = ExactRun(gm, keep=True)
        if not (jumps or pairs) or run.results(list(given.values())) is None:
            continue
        for node in pairs[:_MAX_CALLS]:
            for taken, other in (node.args[:2], node.args[1::-1]):
                yield from _made_equal(gm, given, free, _path_to_input(taken, run.values), other)
        for node in jumps[:_MAX_CALLS]:
            path = _path_to_input(node.args[0], run.values)
            beside = {other for node in path[:-1] for other in node.all_input_nodes} - set(path)
            beside = beside.union(*map(ancestors, beside))
            if len(path) > 1 and path[-1].name in free:
                free_on_path = {value.name for value in beside if value.name in free}
                yield from _solve(gm, given, free_on_path, path, _jump_points(node))


def _compares_values(node: fx.Node) -> bool:
    """Whether a call compares two computed values."""
    return packet(node) in _COMPARISONS and len(node.all_input_nodes) == 2


def _made_equal(
    gm: fx.GraphModule,
    given: Mapping[str, Any],
    free: Collection[str],
    path: Sequence[fx.Node],
    other: fx.Node,
) -> Iterator[dict[str, Tensor]]:
    """Yield values of free inputs at which half of a value's elements equal those of another value.

    The free inputs of that one are zero, at which an exponential or a sigmoid rounds nothing.
    """
    behind = {other, *ancestors(other)}
    if path[-1].name not in free or path[-1] in behind:
        return
    start, zeros = (
        given[path[-1].name],
        {n.name: torch.zeros_like(given[n.name]) for n in behind if n.name in free},
    )
    run = ExactRun(gm, keep=True)
    if run.results(list({**given, **zeros}.values())) is None:
        return
    first, goal = run.values[path[0].name], run.values[other.name]
    if goal.is_floating_point() and is_broadcastable(goal, first) and first.numel():
        goal = torch.where(torch.arange(first.numel()).view(first.shape) % 2 == 0, goal, first)
        for node, taken in itertools.pairwise(path):
            goal = _invert_call(node, taken, goal, run.values)
        yield {path[-1].name: torch.where(goal.isfinite(), goal, start), **zeros}


def _jump_points(node: Any) -> Sequence[float]:
    """Values of its first argument at which a call's result jumps."""
    if packet(node) in _COMPARISONS:
        return [float(n) for n in node.args[1:] if type(n) in (int, float)]
    value, taken = value_of(node), value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    is_cast = packet(node) in _COPY_OPS and isinstance(taken, Tensor) and taken.is_floating_point()
    if is_cast and value.dtype is not torch.bool and not value.is_floating_point():
        return _INTEGERS
    return () if node.kwargs or len(node.args) > 1 else _JUMPS.get(packet(node), ())


def _path_to_input(node: Any, values: Mapping[str, Any]) -> list[fx.Node]:
    """A value and its sources, one after the other, through sums and products with others, up to an input."""
    path = [node]
    while (
        isinstance(path[-1], fx.Node)
        and path[-1].op == "call_function"
        and (given := _argument_to_follow(path[-1], values))
    ):
        path.append(given)
    return path if isinstance(path[-1], fx.Node) and path[-1].op == "placeholder" else path[:1]


def _argument_to_follow(node: Any, values: Mapping[str, Any]) -> fx.Node | None:
    """The argument to follow back through a call: of the size of its result, or multiplied with a matrix.

    If there are two, it is the one nearest to an input.
    """
    if packet(node) in (*_VIEW_OPS, aten.slice) or (packet(node) in _MATMULS and not node.kwargs):
        return node.args[-2] if packet(node) in _MATMULS else node.args[0]
    if packet(node) not in (*_COPY_OPS, *_BINARY_OPS, aten.neg, aten.expand) or (
        node.kwargs and packet(node) not in _COPY_OPS
    ):
        return None
    shape = values[node.name].shape
    given = [n for n in node.all_input_nodes if getattr(values[n.name], "shape", None) == shape]
    if packet(node) is aten.div:
        return given[0] if given and given[0] is node.args[0] else None
    own = [
        n for n in given if all(has_own_inputs(n, other) for other in node.all_input_nodes if other is not n)
    ]
    if not own and all(packet(n) is aten.slice for n in given):  # parts of one value, such as of boxes
        own = given[:1]
    return min(own, key=lambda n: len(ancestors(n)), default=None)


def _solve(
    gm: fx.GraphModule,
    given: Mapping[str, Any],
    free_on_path: Collection[str],
    path: Sequence[fx.Node],
    numbers: Sequence[float],
) -> Iterator[dict[str, Tensor]]:
    """Yield values of the last node of a way, and of free inputs met on it, that make the first one numbers.

    The last node may be met itself (what is scaled by its own largest element): that element stays.
    """
    matrices = {_matrix_source(node.args[-1]) for node in path if packet(node) in _MATMULS}
    others = {name: _power_of_two(given[name]) for name in free_on_path if name != path[-1].name}
    others |= {n.name: _identity(given[n.name]) for n in matrices if n.name in others}
    run = ExactRun(gm, keep=True)
    if run.results(list({**given, **others}.values())) is None:
        return
    start, first = given[path[-1].name], run.values[path[0].name]
    if not first.numel():
        return
    kept = (
        _extreme_mask(start) if path[-1].name in free_on_path else torch.zeros_like(start, dtype=torch.bool)
    )
    for turn in range(min(MAX_TURNS, -(-len(numbers) // first.numel()))):
        at = torch.arange(first.numel(), device=first.device) + turn * first.numel()
        goal = start.new_tensor(numbers)[at % len(numbers)].view(first.shape)
        for node, taken in itertools.pairwise(path):
            goal = _invert_call(node, taken, goal, run.values)
        yield {path[-1].name: torch.where(goal.isfinite() & ~kept, goal, start), **others}


def _invert_call(node: Any, taken: fx.Node, goal: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Compute the argument for which a call returns the goal."""
    if packet(node) is aten.neg:
        return -goal
    if packet(node) in _COPY_OPS or packet(node) is aten.expand:
        return goal
    if packet(node) in _VIEW_OPS:
        return goal.reshape(values[taken.name].shape)
    if packet(node) is aten.slice:
        return torch.slice_scatter(values[taken.name], goal, *node.args[1:])
    if packet(node) in _MATMULS:
        for at in _MATMULS[packet(node)]:
            goal = goal - values[node.args[at].name]
        found = goal.new_zeros(values[taken.name].shape)
        size = min(found.shape[-1], goal.shape[-1])
        found[..., :size] = goal[..., :size]
        return found
    other = node.args[1] if node.args[0] is taken else node.args[0]
    held = values[other.name] if isinstance(other, fx.Node) else other
    if packet(node) is aten.add:
        return goal - held
    if packet(node) is aten.sub:
        return goal + held if node.args[0] is taken else held - goal
    return goal * held if packet(node) is aten.div else goal / held


def _power_of_two(value: Tensor) -> Tensor:
    """Round elements to the nearest powers of two."""
    nearest = value.sign() * value.abs().log2().round().exp2()
    return torch.where(nearest.isfinite() & (nearest != 0), nearest, value)


def _matrix_source(node: Any) -> fx.Node:
    """The source of a matrix that is a view."""
    while packet(node) in _LAYOUT_OPS:
        node = node.args[0]
    return node


def _identity(value: Tensor) -> Tensor:
    """The identity in place of a matrix, or of each in a batch."""
    if value.dim() < 2:
        return value
    return torch.eye(*value.shape[-2:], dtype=value.dtype, device=value.device).expand(value.shape).clone()


def _extreme_mask(value: Tensor) -> Tensor:
    """Where an element is the largest along some dimension."""
    size = value.abs()
    lines = [size == size.amax(dim, True) for dim in range(value.dim())]
    return torch.stack([*lines, size == size.max()]).any(0)
