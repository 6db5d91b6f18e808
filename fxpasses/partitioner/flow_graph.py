"""Turn a joint graph into a few small flow networks whose cuts choose the saved values.

The decision is a minimum cut, as in "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion
Aware" (He and Yu, MLSys 2023). Node ``v`` becomes two vertices, ``v.in`` (is ``v`` computed in the backward
pass?) and ``v.out`` (is its value available there?), with these edges:

- ``v.in -> v.out`` costs the bytes of ``v``: cutting it saves the value;
- ``source -> v.in`` costs the recomputation of ``v`` (unbounded for what must not run twice);
- ``v.out -> u.in`` is unbounded: recomputing ``u`` needs its inputs;
- ``v.out -> sink`` is unbounded if the backward pass reads ``v``.

Most of a real network is decided before any flow runs. What is forced onto one side is folded into the source
or the sink, which cuts the rest into small independent components, and chains inside a component are merged.
Repeated layers give components with equal numbers, which are solved once.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.fx as fx

from fxpasses.partitioner import _torch
from fxpasses.partitioner.classify import JointGraph
from fxpasses.partitioner.cost import CostModel, is_view
from fxpasses.partitioner.errors import PartitionError
from fxpasses.partitioner.recomputation import RecomputePolicy, Terms, Verdict

SOURCE, SINK = -1, -2

UNDECIDED, FORWARD, BACKWARD = 0, 1, 2
"""The side of a vertex: the source's (forward pass only) or the sink's (needed in the backward pass)."""

Edge = tuple[int, int, int | None]


@dataclasses.dataclass(frozen=True)
class Component:
    """An independent part of the flow network, with its own numbering so that repeated parts compare equal.

    Attributes:
        size: the number of its vertices, without the terminals.
        edges: ``(tail, head, capacity)``. A capacity of None is unbounded. The terminals are SOURCE and SINK.
        prices: ``(vertex, FLOPs)``: edges from the source whose capacity is the FLOPs times the price of one
            FLOP.
    """

    size: int
    edges: tuple[Edge, ...]
    prices: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """One occurrence of a component in the joint graph.

    Attributes:
        component: which component.
        vertices: ``(2 * node, vertex)`` for ``node.in`` and ``(2 * node + 1, vertex)`` for ``node.out``.
    """

    component: Component
    vertices: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Network:
    """The sides that are decided, and the components whose cuts decide the rest.

    Attributes:
        side: FORWARD, BACKWARD or UNDECIDED: ``node.in`` at ``2 * node``, ``node.out`` at ``2 * node + 1``.
        occurrences: the components of the undecided vertices, in graph order.
        weights: the weight of saving each node, None if it cannot be saved.
    """

    side: bytearray
    occurrences: list[Occurrence]
    weights: list[int | None]


def save_weights(
    graph: JointGraph, cost: CostModel, terms: Sequence[Verdict], policy: RecomputePolicy
) -> tuple[list[int | None], int]:
    """Weigh the cost of saving each node.

    Bytes decide. At equal bytes, values that are alive anyway (inputs, outputs of the forward pass) are
    preferred to others, others to views, and views to inputs that are overwritten (saving one takes a copy).
    The unit is large enough that these differences never add up to a byte.

    Args:
        graph: the joint graph.
        cost: how many bytes a value has.
        terms: for each node, on which terms the backward pass may recompute it.
        policy: whether parameters count.

    Returns:
        The weight of each node, ``None`` if it cannot be saved, and the weight of one byte.
    """
    unit = 4 * len(graph.nodes) + 1
    alive = {graph.index[n] for n in graph.forward_outputs if isinstance(n, fx.Node)} | set(graph.primals)
    weights: list[int | None] = []
    overwritten_views: set[int] = set(graph.mutated_inputs)
    for i, node in enumerate(graph.nodes):
        value = node.meta.get("val")
        view = is_view(node)
        weight: int | None
        if not graph.live[i]:
            weight = None
        elif view and any(j in overwritten_views for j in graph.inputs[i]):
            overwritten_views.add(i)
            weight = None
        elif terms[i].terms is Terms.ALWAYS:
            weight = None
        elif (
            _torch.is_sym_node(node) and not isinstance(value, torch.SymInt) and terms[i].terms is Terms.FREE
        ):
            weight = None  # a bool or a float: recomputed from the sizes that it depends on
        elif _torch.is_sym_node(node) or isinstance(value, _torch.BackwardState) or _torch.is_opaque(node):
            weight = 1
        elif not isinstance(value, torch.Tensor):
            weight = None
        elif i in graph.static_inputs and policy.parameters_are_free and i not in graph.mutated_inputs:
            weight = 0
        else:
            size = cost.bytes_of(node)
            tie = 3 if i in graph.mutated_inputs else 2 if view else 0 if i in alive else 1
            weight = size * unit + tie
            if view and terms[i].terms is Terms.FREE:
                base = next(iter(graph.inputs[i]), None)
                if base is None:
                    weight = None  # a view of a graph constant, which both passes have
                elif terms[base].terms is not Terms.ALWAYS and cost.bytes_of(graph.nodes[base]) <= size:
                    weight = None  # saving its base is never worse
        weights.append(weight)
    return weights, unit


def build_network(
    graph: JointGraph, cost: CostModel, terms: Sequence[Verdict], weights: list[int | None], *, priced: bool
) -> Network:
    """Decide what is forced, and split the rest into components.

    Args:
        priced: whether priced operations may be recomputed. If not, they are saved like forbidden ones.

    Raises:
        PartitionError: if the backward pass needs a value that can be neither saved nor recomputed.
    """
    side = _forced_sides(graph, terms, weights, priced)
    edges, prices, merged = _edges(graph, cost, terms, weights, side, priced)
    return Network(side, _split(side, edges, prices, merged), weights)


def _forced_sides(
    graph: JointGraph, terms: Sequence[Verdict], weights: Sequence[int | None], priced: bool
) -> bytearray:
    count = len(graph.nodes)
    side = bytearray(2 * count)
    for i in graph.tangent_free_outputs:
        side[2 * i + 1] = BACKWARD
    for i in range(count - 1, -1, -1):  # readers come after what they read
        if not graph.live[i]:
            continue
        if graph.in_backward[i] or (side[2 * i + 1] == BACKWARD and weights[i] is None):
            side[2 * i] = BACKWARD
            for j in graph.inputs[i]:
                side[2 * j + 1] = BACKWARD
    for i in range(count):
        if graph.in_backward[i] or not graph.live[i]:
            continue
        kind = terms[i].terms
        if kind is Terms.NEVER or (kind is Terms.PRICED and not priced):
            _force_forward(side, 2 * i, graph, terms)
        if side[2 * i] == FORWARD and weights[i] is None:
            _force_forward(side, 2 * i + 1, graph, terms)
            for user in graph.users[i]:
                if not graph.in_backward[user]:
                    _force_forward(side, 2 * user, graph, terms)
    return side


def _force_forward(side: bytearray, vertex: int, graph: JointGraph, terms: Sequence[Verdict]) -> None:
    if side[vertex] == BACKWARD:
        node = graph.nodes[vertex // 2]
        reason = f"the backward pass needs it, it cannot be recomputed ({terms[vertex // 2].reason}) or saved"
        raise PartitionError(node.name, reason, node.meta.get("stack_trace"))
    side[vertex] = FORWARD


def _edges(
    graph: JointGraph,
    cost: CostModel,
    terms: Sequence[Verdict],
    weights: Sequence[int | None],
    side: bytearray,
    priced: bool,
) -> tuple[list[Edge], list[tuple[int, int]], "_UnionFind"]:
    """Edges between undecided vertices and the terminals, with chains merged."""
    merged = _UnionFind(2 * len(graph.nodes))
    edges: list[Edge] = []
    prices: list[tuple[int, int]] = []
    into: dict[int, list[int]] = {}
    for i, weight in enumerate(weights):
        if graph.in_backward[i] or not graph.live[i]:
            continue
        computed, available = side[2 * i], side[2 * i + 1]
        if computed == UNDECIDED and priced and terms[i].terms is Terms.PRICED:
            prices.append((2 * i, max(1, cost.flops_of(graph.nodes[i]))))
        if available == UNDECIDED:
            readers = [u for u in graph.users[i] if not graph.in_backward[u] and side[2 * u] == UNDECIDED]
            for user in readers:
                into.setdefault(2 * user, []).append(2 * i + 1)
            if len(readers) == 1:
                merged.join(2 * i + 1, 2 * readers[0])  # nothing else wants the value
            if weight is None and computed == UNDECIDED:
                merged.join(2 * i, 2 * i + 1)
            elif computed != BACKWARD:
                edges.append((2 * i if computed == UNDECIDED else SOURCE, 2 * i + 1, weight))
        elif available == BACKWARD and computed == UNDECIDED:
            edges.append((2 * i, SINK, weight))
    with_price = {vertex for vertex, _ in prices}
    for head, tails in into.items():
        if len(tails) == 1 and head not in with_price:
            merged.join(tails[0], head)  # recomputed for free once its operand is available
        else:
            edges.extend((tail, head, None) for tail in tails)
    find = merged.find
    return (
        [(t if t < 0 else find(t), h if h < 0 else find(h), c) for t, h, c in edges],
        [(find(vertex), flops) for vertex, flops in prices],
        merged,
    )


def _split(
    side: bytearray, edges: list[Edge], prices: list[tuple[int, int]], merged: "_UnionFind"
) -> list[Occurrence]:
    """Drop what no path from source to sink crosses, and split the rest into components."""
    capacity: dict[tuple[int, int], int | None] = {}
    for tail, head, amount in edges:
        if tail != head and amount != 0:
            before = capacity.get((tail, head), 0)
            capacity[tail, head] = None if amount is None or before is None else before + amount
    price_of: dict[int, int] = {}
    for vertex, flops in prices:
        price_of[vertex] = price_of.get(vertex, 0) + flops

    after: dict[int, list[int]] = {}
    ahead: dict[int, list[int]] = {}
    for tail, head in capacity:
        after.setdefault(tail, []).append(head)
        ahead.setdefault(head, []).append(tail)
    after.setdefault(SOURCE, []).extend(price_of)
    from_source = _reachable(SOURCE, after)
    to_sink = _reachable(SINK, ahead)

    members: dict[int, list[int]] = {}
    for vertex in range(len(side)):
        if side[vertex] == UNDECIDED:
            root = merged.find(vertex)
            if root not in to_sink:
                side[vertex] = FORWARD  # nothing in the backward pass needs it
            elif root not in from_source:
                side[vertex] = BACKWARD  # costs nothing there
            else:
                members.setdefault(root, []).append(vertex)
    return _components(members, capacity, price_of)


def _components(
    members: dict[int, list[int]], capacity: dict[tuple[int, int], int | None], price_of: dict[int, int]
) -> list[Occurrence]:
    together = _UnionFind(max(members, default=0) + 1)
    inner = [
        (t, h, c) for (t, h), c in capacity.items() if (t < 0 or t in members) and (h < 0 or h in members)
    ]
    for tail, head, _ in inner:
        if tail >= 0 and head >= 0:
            together.join(tail, head)
    groups: dict[int, list[int]] = {}
    for root in members:  # ascending by the first vertex of each
        groups.setdefault(together.find(root), []).append(root)
    number: dict[int, int] = {SOURCE: SOURCE, SINK: SINK}
    for roots in groups.values():
        number.update((root, k) for k, root in enumerate(roots))
    edges_of: dict[int, list[Edge]] = {group: [] for group in groups}
    for tail, head, amount in inner:
        if tail >= 0 or head >= 0:
            group = together.find(tail if tail >= 0 else head)
            edges_of[group].append((number[tail], number[head], amount))
    known: dict[Component, Component] = {}
    occurrences = []
    for group, roots in groups.items():
        component = Component(
            len(roots),
            tuple(sorted(edges_of[group], key=lambda edge: edge[:2])),
            tuple((number[root], price_of[root]) for root in roots if root in price_of),
        )
        component = known.setdefault(component, component)
        vertices = tuple((vertex, number[root]) for root in roots for vertex in members[root])
        occurrences.append(Occurrence(component, vertices))
    return occurrences


def _reachable(start: int, neighbours: dict[int, list[int]]) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for vertex in neighbours.get(stack.pop(), ()):
            if vertex not in seen:
                seen.add(vertex)
                stack.append(vertex)
    return seen


class _UnionFind:
    """Union-find over vertices. The lowest number of a set represents it."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, vertex: int) -> int:
        parent = self._parent
        while parent[vertex] != vertex:
            parent[vertex] = vertex = parent[parent[vertex]]
        return vertex

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a < b:
            self._parent[b] = a
        else:
            self._parent[a] = b
