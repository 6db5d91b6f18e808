"""Calls that may keep NaN and infinities from a result: where a pass takes one, these may be meant to be kept."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_GUARDS = {
    *(aten.where, aten.nan_to_num, aten.masked_fill, aten.clamp, aten.clamp_min, aten.clamp_max),
    *(aten.maximum, aten.minimum, aten.amax, aten.amin, aten.relu, aten.hardtanh, aten._safe_softmax),
}


def had_guards(before: fx.GraphModule, after: fx.GraphModule, names: Collection[str]) -> bool:
    """Whether a pass took or changed a call that may keep NaN and infinities from its result: one that chooses, compares, or makes integers.

    Args:
        before: the graph before.
        after: what a pass made of it.
        names: of the calls that it took or changed.
    """

    def told(node: fx.Node) -> str:
        return f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda _: None)}"

    kept = {node.name: told(node) for node in after.graph.nodes}
    of_floats: set[fx.Node] = set()  # what may be NaN: no count, and no position
    for node in before.graph.nodes:
        value, packet = node.meta.get("val"), getattr(node.target, "overloadpacket", None)
        is_float = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        is_reached = any(given in of_floats for given in node.all_input_nodes)
        guards = is_reached and (packet in _GUARDS or not is_float)
        if node.name in names and guards and kept.get(node.name) != told(node):
            return True
        if is_float and (is_reached or node.op == "placeholder"):
            of_floats.add(node)
    return False
