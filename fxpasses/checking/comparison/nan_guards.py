"""Calls that may keep NaN and infinity out of a result. If a pass removes one, that may matter."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.graphs.aliasing import is_mutating
from fxpasses.graphs.rewriting import outputs_of

aten = torch.ops.aten

_GUARDS = {
    *(aten.where, aten.nan_to_num, aten.masked_fill, aten.clamp, aten.clamp_min, aten.clamp_max),
    *(aten.maximum, aten.minimum, aten.amax, aten.amin, aten.relu, aten.hardtanh, aten._safe_softmax),
}
_MASKS = {aten.where, aten.masked_fill}
_FINITE_TESTS = {aten.isnan, aten.isinf, aten.isposinf, aten.isneginf, aten.isfinite, aten.nan_to_num}
_OPS_WITH_FINITE_TESTS = {aten.logsumexp, aten.logaddexp}
_COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}


def has_masks(gm: fx.GraphModule) -> bool:
    """Whether a graph has a call that hides elements by others: with random masks, it is chance which."""
    return any(getattr(node.target, "overloadpacket", None) in _MASKS for node in gm.graph.nodes)


def had_guards(before: fx.GraphModule, after: fx.GraphModule, names: Collection[str]) -> bool:
    """Whether a pass removed or changed a call that may block NaN and infinity.

    Such a call chooses, compares, or computes integers.

    Args:
        before: the graph before.
        after: what a pass made of it.
        names: of the calls that it removed or changed.
    """

    def describe(node: fx.Node) -> str:
        return f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda _: None)}"

    kept = {node.name: describe(node) for node in after.graph.nodes}
    float_nodes: set[fx.Node] = set()  # what may be NaN: neither counts nor positions
    for node in before.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        held = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        is_float = bool(held) and all(value.is_floating_point() or value.is_complex() for value in held)
        is_reached = any(given in float_nodes for given in node.all_input_nodes)
        guards = is_reached and (packet in _GUARDS or not is_float)
        if node.name in names and guards and kept.get(node.name) != describe(node):
            return True
        if is_float and (is_reached or node.op == "placeholder"):
            float_nodes.add(node)
    return False


def answers(before: fx.GraphModule, names: Collection[str], infinite: bool = False) -> list[int]:
    """Return the positions of results that follow a call that tests whether numbers are finite.

    Such results matter for non-finite numbers. Outputs count first, then inputs that are written.

    Args:
        before: the graph before.
        names: of the calls that a pass removed or changed. If neither they nor their arguments involve a
            test, there are no such results.
        infinite: whether to return only results that matter where they are infinite themselves: of the user's
            tests, and of those of an operator (``logsumexp``) that a pass removed alone. What else it is part
            of may be NaN there.
    """
    following: set[fx.Node] = set()
    for node in before.graph.nodes:
        if _is_finite_test(node) or not following.isdisjoint(node.all_input_nodes):
            following.add(node)
    taken = [node for node in following if node.name in names and node.op == "call_function"]
    inside = {_operator_of(node) for node in following if _is_finite_test(node)} - {None}
    if not taken or (infinite and inside and not inside.issuperset(map(_operator_of, taken))):
        return []
    inputs = before.graph.find_nodes(op="placeholder")
    written = [following & {user for user in node.users if is_mutating(user)} for node in inputs]
    results = [*(value in following for value in outputs_of(before.graph)), *map(bool, written)]
    return [position for position, follows in enumerate(results) if follows]


def has_finite_tests(gm: fx.GraphModule) -> bool:
    """Whether a graph tests whether numbers are finite."""
    return any(map(_is_finite_test, gm.graph.nodes))


def _operator_of(node: fx.Node) -> Any:
    """The operator that a call is part of, or one with a test inside; ``None`` for the user's own calls."""
    own = getattr(node.target, "overloadpacket", None)
    packet = getattr(node.meta.get("original_aten"), "overloadpacket", own)
    return packet if packet is not own or packet in _OPS_WITH_FINITE_TESTS else None


def _is_finite_test(node: fx.Node) -> bool:
    """Whether a call tests for finite numbers: by name, or by comparing with infinity or with itself."""
    packet = getattr(node.target, "overloadpacket", None)
    compared = node.args[1:2] if packet in _COMPARISONS else ()
    return packet in (_FINITE_TESTS | _OPS_WITH_FINITE_TESTS) or any(
        other is node.args[0] or (isinstance(other, float) and math.isinf(other)) for other in compared
    )
