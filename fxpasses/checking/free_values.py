"""Values inside of a graph that may be any number, or any of a range, whatever others are: what inputs of the graph give them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.exact.ranges import Range
from fxpasses.graphs.rewriting import value_of

aten, prims = torch.ops.aten, torch.ops.prims

_PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.embedding),
    *(aten._scaled_dot_product_flash_attention_for_cpu, aten._to_copy),
}
_KEEPING = {
    *(aten.view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze),
    *(aten.clone, aten.alias, aten.detach, aten.slice, aten.select, aten.neg, aten.mul, aten.div),
    *(aten.as_strided, aten.expand, aten.split, operator.getitem),
    *(aten._to_copy, prims.convert_element_type, aten._unsafe_view),
}
"""Operators that give any numbers when their first argument is any, and the others are numbers."""
_INVERSES: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.exp: torch.log,
    aten.log: torch.exp,
    aten.exp2: torch.log2,
    aten.log2: torch.exp2,
    aten.expm1: torch.log1p,
    aten.log1p: torch.expm1,
    aten.sigmoid: torch.logit,
    aten.tanh: torch.atanh,
    aten.reciprocal: torch.reciprocal,
    aten.rsqrt: lambda value: value**-2,
    aten.sqrt: torch.square,
    aten.square: torch.sqrt,
    aten.pow: torch.sqrt,
}
"""Operators that give any number of their range when their argument is any, with what gives the argument (``pow`` where it squares)."""


def is_free(node: fx.Node, calls: int = 32) -> bool:
    """Whether inputs of the graph can give this value any elements; by so many calls at most."""
    called = packet(node)
    if node.op == "placeholder" or called in _PRODUCTS:
        value = value_of(node)
        return isinstance(value, Tensor) and value.is_floating_point()
    (given, *others) = node.all_input_nodes[::-1] or [node]
    if calls == 0 or len(others) > 1:
        return False
    if others and called in (aten.add, aten.sub):
        pairs = itertools.permutations((given, *others))
        return any(is_free(one, calls - 1) and _has_own(one, other) for one, other in pairs)
    if others:  # a product with what is no zero, unless it is chosen
        is_product = called is aten.mul and _has_own(given, others[0]) and _has_own(others[0], given)
        return is_product and is_free(given, calls - 1) and is_free(others[0], calls - 1)
    handed_on = {*_KEEPING, aten.add, aten.sub}
    return (called in handed_on or _inverse(node) is not None) and is_free(given, calls - 1)


def _has_own(node: fx.Node, other: fx.Node) -> bool:
    """Whether inputs of the graph make a value that do not make another one."""
    mine, theirs = ({value, *origin(value)} for value in (node, other))
    return any(value.op == "placeholder" for value in mine - theirs)


def _inverse(node: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """What gives the argument of a call of one argument, of its result."""
    if packet(node) is aten.pow and node.args[1:] != (2,):
        return None
    number = node.args[1] if len(node.args) > 1 else None
    if packet(node) is aten.mul and isinstance(number, (int, float)) and number:
        return lambda value: value / number
    return _INVERSES.get(packet(node))


def within(values: Mapping[str, Tensor], known: Mapping[str, Range]) -> dict[str, Tensor]:
    """Values of a graph, as far as their ranges let them be."""
    ends = {name: known.get(name, Range()) for name in values}
    return {name: value.clamp(ends[name].low, ends[name].high) for name, value in values.items()}


def with_sources(gm: fx.GraphModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values, and arguments of calls that give them."""
    found = dict(values)
    for node in reversed(gm.graph.nodes):
        inverse = _inverse(node)
        if node.name in found and inverse is not None:
            (source,) = node.all_input_nodes
            found.setdefault(source.name, inverse(found[node.name]))
    return found


def origin(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        value = queue.pop()
        if value not in found:
            found.add(value)
            queue += value.all_input_nodes
    return found


def is_apart(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value can be any while another one stays as it is, unless that is computed from it."""
    if node is other:
        return True
    mine, theirs = origin(node), origin(other)
    own = {value for value in mine - theirs if value.op == "placeholder" and value is not other}
    return other not in mine and (node in theirs or bool(own))


def packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)
