"""Cut a graph into segments where overlapped messages start and end, so that they keep their places.

Inductor keeps collectives in order, but not the computation between them. It fuses calls that stand far
apart, so that all results are waited for before the first matmul, and sums start after the last. So if
something expensive stands between a collective and its ``wait_tensor``, collectives and the views and copies
that pack and unpack their messages are called directly. The segments between them end where these calls
stand.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fake.dispatch.communication import communicates
from fake.seam.dispatch import OpOverload, collectives
from fxpasses.graphs.aliasing import is_alias, is_mutating
from fxpasses.partitioner.cost import is_getitem

aten, prims = torch.ops.aten, torch.ops.prims

_WAIT = collectives.wait_tensor.default
_COPIES = {aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default, prims.convert_element_type.default}  # fmt: skip


def overlaps(graph: fx.Graph, direct: Collection[fx.Node]) -> bool:
    """Whether an expensive or already compiled call stands between a collective and its wait."""
    in_flight: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _WAIT:
            in_flight.discard(node.args[0])
        elif _communicates(node):
            if any(user.target is _WAIT for user in node.users):
                in_flight.add(node)
        elif in_flight and (_is_expensive(node) or node in direct):
            return True
    return False


def communication_calls(graph: fx.Graph) -> set[fx.Node]:
    """Collectives, and the calls that pack and unpack their messages: as cheap in eager as compiled."""
    found = {node for node in graph.nodes if _communicates(node)}
    for nodes, ends in ((graph.nodes, "all_input_nodes"), (reversed(graph.nodes), "users")):
        for node in nodes:
            around = list(getattr(node, ends))
            moves = node.op == "call_function" and (node.target in _COPIES or is_alias(node))
            if moves and not is_mutating(node) and around and found.issuperset(around):
                found.add(node)
    return found


def depths_in_order(graph: fx.Graph, running: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For each call, how many segments run before it, if direct calls keep their order.

    A direct call that communicates stays behind the expensive calls before it.

    Args:
        graph: the graph.
        running: the direct calls.
    """
    depth: dict[fx.Node, int] = {}
    last, expensive, floor = 0, -1, 0
    for node in graph.nodes:
        if node.op != "call_function" or is_mutating(node):
            continue
        inputs = [n for n in node.all_input_nodes if n in depth]
        if node in running:
            last = max([last, *(depth[n] for n in inputs)])
            if _communicates(node):
                last = max(last, expensive)
                floor = last + 1 if expensive == last else floor
            depth[node] = last
        elif is_getitem(node) and node.args[0] in running:
            depth[node] = depth[node.args[0]]  # type: ignore[index]
        else:
            depth[node] = max((depth[n] + _is_direct_result(n, running) for n in inputs), default=0)
            if _is_expensive(node):
                depth[node] = max(depth[node], floor)
                expensive = max(expensive, depth[node])
    deepest = max((d + (n in running) for n, d in depth.items()), default=0)
    # Writes to inputs come last, when no one reads the old values anymore.
    return depth | {n: deepest for n in graph.nodes if n.op == "call_function" and is_mutating(n)}


def _is_direct_result(node: fx.Node, running: Collection[fx.Node]) -> bool:
    return node in running or (is_getitem(node) and node.args[0] in running)


def _communicates(node: fx.Node) -> bool:
    return node.op == "call_function" and communicates(node.target)


def _is_expensive(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in flop_registry
