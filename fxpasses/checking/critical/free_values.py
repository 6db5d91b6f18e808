"""Values inside a graph that may be any number independently of others, and values that follow these.

For example a softplus, a norm, or a difference of two log-softmaxes.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.execution.interpret import RUN_ERRORS, ExactRun, as_float64
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.rewriting import value_of

aten, prims = torch.ops.aten, torch.ops.prims

_PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.embedding),
    *(aten._scaled_dot_product_flash_attention_for_cpu, aten._to_copy),
}
_COPY_OPS = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.clone, aten.alias, aten.detach),
    *(aten._to_copy, prims.convert_element_type),
}
PASS_THROUGH_OPS = {
    *_COPY_OPS,
    *(aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.slice, aten.select),
    *(aten.neg, aten.mul, aten.div, aten.as_strided, aten.split, operator.getitem),
}
"""Operators whose result may be any numbers if their first argument may be, and the others are numbers."""
_FACTORS = [*(-(2.0**power) for power in range(8, -45, -4)), *(2.0**power for power in range(-44, 9, 4))]
"""The factors at which to sample a value before solving for one."""
_HALVINGS = 38
_TOLERANCE = 1e-9
"""How close a value has to get to its goal, relative to it."""
_MAX_SOURCES = 2


def is_free(node: fx.Node, calls: int = 32) -> bool:
    """Whether inputs of the graph can give this value any elements, through at most ``calls`` calls."""
    called = packet(node)
    if node.op == "placeholder" or called in _PRODUCTS:
        value = value_of(node)
        return isinstance(value, Tensor) and value.is_floating_point()
    (given, *others) = node.all_input_nodes[::-1] or [node]
    if calls == 0 or len(others) > 1:
        return False
    if others and called in (aten.add, aten.sub):
        pairs = itertools.permutations((given, *others))
        return any(is_free(one, calls - 1) and has_own_inputs(one, other) for one, other in pairs)
    if others:  # the other factor is zero only if chosen to be
        is_product = (
            called is aten.mul and has_own_inputs(given, others[0]) and has_own_inputs(others[0], given)
        )
        return is_product and is_free(given, calls - 1) and is_free(others[0], calls - 1)
    pass_through = {*PASS_THROUGH_OPS, aten.add, aten.sub}
    return called in pass_through and is_free(given, calls - 1)


def has_own_inputs(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value depends on inputs of the graph that another one does not depend on."""
    mine, theirs = ({value, *ancestors(value)} for value in (node, other))
    return any(value.op == "placeholder" for value in mine - theirs)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Return everything that a value is computed from."""
    found: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        value = queue.pop()
        if value not in found:
            found.add(value)
            queue += value.all_input_nodes
    return found


def is_independent(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value can vary while another one stays as it is, unless that is computed from it."""
    if node is other:
        return True
    mine, theirs = {node, *ancestors(node)}, ancestors(other)
    own = {value for value in mine - theirs if value.op == "placeholder" and value is not other}
    return other not in mine and (node in theirs or bool(own))


def packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


class DependentValues:
    """Values of a graph as functions of given ones, whose elements are multiplied by factors.

    Args:
        gm: the graph.
        given: values that may be any numbers.
        names: of the values.
        values: of the graph, by name.

    Attributes:
        start: the given values, in float64, by name.
        is_independent: whether the given ones may be any numbers while what else the values depend on stays fixed.
    """

    def __init__(
        self, gm: fx.GraphModule, given: Sequence[fx.Node], names: Sequence[str], values: Mapping[str, Any]
    ) -> None:
        below, above = set(given), set()
        for node in gm.graph.nodes:
            if node.op == "call_function" and any(value in below for value in node.all_input_nodes):
                below.add(node)
        for node in reversed(gm.graph.nodes):
            if node in below and (node.name in names or any(user in above for user in node.users)):
                above.add(node)
        calls = above - set(given)
        self._nodes = {node.name: node for node in below}
        beside = {value for node in calls for value in node.all_input_nodes}
        beside |= {node for node in gm.graph.nodes if node.name in names}
        self.is_independent = not any(uses_rng(node) or is_mutating(node) for node in calls)
        self.is_independent &= all(is_independent(*pair) for pair in itertools.product(given, beside - below))
        self._calls, self._names, self._values = {node.name for node in calls}, set(names), values
        self.start = {node.name: as_float64(values[node.name]) for node in given}
        self._run = ExactRun(gm)

    @property
    def _start(self) -> Tensor:
        (start,) = self.start.values()
        return start

    def at(self, factors: Tensor | float) -> dict[str, Tensor]:
        """Return all values, and the given ones, with elements of these multiplied by broadcast factors."""
        return self._run_calls(self._calls, factors)

    def _value_at(self, factors: Tensor | float, name: str) -> Tensor:
        """Return one value, computing no other."""
        node = self._nodes[name]
        needed = {node.name, *(value.name for value in ancestors(node))}
        return self._run_calls(self._calls & needed, factors)[name]

    def _run_calls(self, calls: Set[str], factors: Tensor | float) -> dict[str, Tensor]:
        given = {name: value * factors for name, value in self.start.items()}
        found = self._run.run_calls(calls, {**self._values, **given})
        return {**given, **{name: value for name, value in found.items() if name in self._names}}

    def with_random_start(self, seed: int, positive: bool) -> DependentValues:
        """The same values, with random given ones of the same magnitude."""
        generator = torch.Generator().manual_seed(seed)
        other = copy.copy(self)
        other.start = {}
        for name, value in self.start.items():
            numbers = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
            other.start[name] = (numbers.abs() if positive else numbers) * value.square().mean().sqrt()
        return other

    def _values_at_factors(self, name: str, chosen: Tensor) -> Tensor:
        """The elements of a value with some of them moved by each factor."""
        factors = chosen.new_tensor(_FACTORS, dtype=self._start.dtype)
        return torch.stack(
            [
                self._value_at(torch.where(chosen, factor, 1.0), name).reshape(chosen.shape)
                for factor in factors
            ]
        )

    def bounds(self, name: str) -> tuple[float, float] | None:
        """The smallest and largest element that factors give a value; ``None`` if it follows none of them."""
        shape = aligned_shape(self._values[name].shape, self._start.shape)
        if shape is None:
            return None
        try:
            table = self._values_at_factors(name, torch.ones(shape, dtype=torch.bool)).nan_to_num(
                0.0, 0.0, 0.0
            )
        except RUN_ERRORS:
            return None
        return table.min().item(), table.max().item()

    def solve(self, name: str, wanted: Tensor) -> dict[str, Tensor] | None:
        """Return all values, with elements of one exactly as wanted, as far as factors achieve that.

        Args:
            name: of a value that has ends.
            wanted: the wanted elements; NaN for any.
        """
        shape = aligned_shape(wanted.shape, self._start.shape)
        assert shape is not None
        goal = wanted.reshape(shape)
        factors = goal.new_tensor(_FACTORS)
        above = self._values_at_factors(name, ~goal.isnan()) > goal
        turns = above[1:] != above[:-1]
        chosen, at = turns.any(0), turns.long().argmax(0)
        low, high = factors[at], factors[at + 1]
        is_above = above.gather(0, at[None])[0]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            value = self._value_at(torch.where(chosen, middle, 1.0), name).reshape(shape)
            is_low = (value > goal) == is_above
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        now = torch.where(chosen, low, 1.0)
        now = torch.where(self._reaches_goal(now, name, goal), now, 1.0)
        hit = self._reaches_goal(now, name, goal)
        if not bool(hit.any()):
            return None
        found = self.at(now)
        found[name] = torch.where(hit.view(wanted.shape), wanted, found[name])
        return found

    def _reaches_goal(self, factors: Tensor, name: str, goal: Tensor) -> Tensor:
        return (self._value_at(factors, name).reshape(goal.shape) - goal).abs() <= _TOLERANCE * goal.abs()


def aligned_shape(shape: Sequence[Any], whole: Sequence[Any]) -> list[Any] | None:
    """Return the sizes of a value at their places in the shape of its source, ones elsewhere, or ``None``.

    >>> aligned_shape([4, 1], [4, 6]), aligned_shape([6], [4, 6]), aligned_shape([5], [4, 6]), aligned_shape([4, 1], [4, 4])
    ([4, 1], [1, 6], None, [4, 1])
    """
    if len(shape) == len(whole) and all(size in (1, other) for size, other in zip(shape, whole, strict=True)):
        return list(shape)
    rest = [size for size in reversed(shape) if size != 1]
    found = []
    for size in reversed(whole):
        found.append(rest.pop(0) if rest and rest[0] == size else 1)
    return None if rest else found[::-1]


def _sizes(fake: Tensor) -> list[Any]:
    """Sizes as expressions: comparing them adds no guard and needs no value, as some depend on data."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in fake.shape]


def copied_value(node: fx.Node) -> fx.Node:
    """Return what a value is a copy of, in the same shape and dtype; itself if it is none."""
    while packet(node) in _COPY_OPS:
        given = node.all_input_nodes[0]
        mine, theirs = value_of(node), value_of(given)
        if mine.dtype != theirs.dtype or _sizes(mine) != _sizes(theirs):
            break
        node = given
    return node


def nearest_free_values(node: fx.Node, only_graph_inputs: bool) -> Iterator[fx.Node]:
    """Yield the nearest free values whose elements those of a value may follow.

    Args:
        node: the value.
        only_graph_inputs: whether only inputs of the graph count.
    """
    value, queue, seen = value_of(node), [node], {node}
    found = 0
    while queue and found < _MAX_SOURCES:
        taken = queue.pop(0)
        fake = value_of(taken)
        is_source = (
            taken is not node
            and isinstance(fake, Tensor)
            and (taken.op == "placeholder" or not only_graph_inputs)
        )
        if is_source and is_free(taken) and aligned_shape(_sizes(value), _sizes(fake)) is not None:
            found += 1
            yield taken
            continue
        new = [given for given in taken.all_input_nodes if given not in seen]
        seen.update(new)
        queue += new
