"""Overlap communication between processes with computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fake.dispatch.communication import communicates
from fake.seam.dispatch import collectives
from fxpasses.graphs.aliasing import AliasInfo, is_alias
from fxpasses.graphs.rewriting import value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import is_call, needed_before, shape_of
from fxpasses.passes._options import require_at_least

aten, prims = torch.ops.aten, torch.ops.prims

WAIT = collectives.wait_tensor.default
_COPIES = {
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}
"""Calls that pack and unpack messages, besides views. They cost no more than a copy anywhere in the graph."""


@dataclass(frozen=True)
class OverlapCollectives(Pass):
    """Start collectives before their results are needed, and wait only when they are.

    A collective runs in the background between its call and ``wait_tensor``. Usually the program has nothing
    between the two: parameters are gathered where a layer reads them, and gradients are waited for where they
    are reduced.

    Before::

        w1 = wait_tensor(all_gather_into_tensor(shard_1, 2, '0'))
        y1 = aten.mm(x, w1)
        w2 = wait_tensor(all_gather_into_tensor(shard_2, 2, '0'))
        y2 = aten.mm(y1, w2)

    After::

        started_1 = all_gather_into_tensor(shard_1, 2, '0')
        started_2 = all_gather_into_tensor(shard_2, 2, '0')
        y1 = aten.mm(x, wait_tensor(started_1))
        y2 = aten.mm(y1, wait_tensor(started_2))

    Waits, with the views and copies that unpack a message, move down to their first user. A collective on
    graph inputs (shards, behind views, casts and packing) moves up past the waits of those needed before it,
    as far as ``max_bytes`` in flight allow. Collectives keep their order, so all ranks send the same. Run
    this after ``bucket_collectives``, whose ``max_bytes`` should be a fraction of this one: a single message
    leaves nothing to overlap with.

    Attributes:
        max_bytes: maximum size of concurrent messages, in bytes of whole (gathered, unreduced) tensors.
    """

    name: ClassVar[str] = "overlap_collectives"
    contract: ClassVar[Contract] = Contract(("forward", "backward", "inference"), numerics="bitwise")
    max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        require_at_least(self, max_bytes=1)

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        starts = [node for node in gm.graph.nodes if _communicates(node) and node.target is not WAIT]
        waits = {node: next(iter(node.users)) for node in starts if may_move(node, aliases)}
        if not waits or not claim(next(iter(waits))):
            return False
        order = list(gm.graph.nodes)
        _sink_waits(gm.graph, set(waits.values()), aliases)
        self._hoist_starts(gm.graph, starts, waits, aliases)
        return order != list(gm.graph.nodes)

    def _hoist_starts(
        self, graph: fx.Graph, starts: list[fx.Node], waits: dict[fx.Node, fx.Node], aliases: AliasInfo
    ) -> None:
        """Move collectives up, and waits before those that need room, as the limit in flight allows."""
        place = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        in_flight: list[fx.Node] = []
        for node in starts:
            if node not in waits:
                place, in_flight = node.next, [other for other in in_flight if node < waits[other]]
                continue
            target, earlier = place, sorted(in_flight, key=waits.__getitem__)
            while earlier and self._is_full([*earlier, node]) and waits[earlier[0]] < node:
                target = waits[earlier.pop(0)].next
            while copies(target, aliases):  # this collective may pack one of them
                target = target.next
            needed = needed_before([node.args[0]], target) if target < node else None  # type: ignore[list-item]
            if (
                needed is not None
                and not self._is_full([*earlier, node])
                and all(copies(n, aliases) for n in needed)
            ):
                for moved in (*sorted(needed), node):
                    target.prepend(moved)
            else:
                earlier = [other for other in in_flight if node < waits[other]]
                while earlier and self._is_full([*earlier, node]):
                    node.prepend(waits[earlier.pop(0)])
            place, in_flight = node.next, [*earlier, node]

    def _is_full(self, in_flight: list[fx.Node]) -> bool:
        return sum(max(value_of(n).nbytes, value_of(n.args[0]).nbytes) for n in in_flight) > self.max_bytes  # type: ignore[arg-type]


def _sink_waits(graph: fx.Graph, waits: set[fx.Node], aliases: AliasInfo) -> None:
    """Move waits, and the calls that unpack their messages, to just before the first call that needs them."""
    late = set(waits)
    for node in graph.nodes:
        if node.all_input_nodes and late.issuperset(node.all_input_nodes) and copies(node, aliases):
            late.add(node)
    first_before: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.nodes)):
        if node in late and node.users:
            user = min(node.users)
            first_before.setdefault(user, user).prepend(node)
            first_before[user] = node


def _communicates(node: fx.Node) -> bool:
    return node.op == "call_function" and communicates(node.target)


def may_move(node: fx.Node, aliases: AliasInfo) -> bool:
    """Whether a collective has one result with a single wait, and nothing writes to its input."""
    source, users = node.args[0] if node.args else None, list(node.users)
    return (
        len(users) == 1
        and is_call(users[0], WAIT)
        and shape_of(source) is not None
        and shape_of(node) is not None
        and not aliases.mutated & (aliases.roots(source) | aliases.roots(node) | aliases.roots(users[0]))  # type: ignore[arg-type]
    )


def copies(node: fx.Node, aliases: AliasInfo) -> bool:
    """Whether a call packs or unpacks messages in memory that nothing writes to."""
    moves = node.op == "call_function" and (node.target in _COPIES or is_alias(node))
    return moves and not aliases.mutated & frozenset().union(
        *(aliases.roots(n) for n in (node, *node.all_input_nodes))
    )
