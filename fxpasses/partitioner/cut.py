"""Minimum cuts of components, by networkx max-flow, and the cuts that a falling price of FLOPs passes through.

Of all minimum cuts the one closest to the sink is taken: it recomputes a subset of what any other does. It is unique,
so that the answer depends neither on the flow algorithm nor on any order of iteration.
"""

import dataclasses
from collections.abc import Iterable
from fractions import Fraction

import networkx as nx
from networkx.algorithms.flow import preflow_push

from fxpasses.partitioner.flow_graph import SINK, SOURCE, Component


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of one component.

    Attributes:
        backward: the vertices on the sink's side: values recomputed or needed in the backward pass.
        weight: of the values that it saves, in the weights of `flow_graph.save_weights`.
        flops: the FLOPs of the priced operations that it recomputes.
    """

    backward: frozenset[int]
    weight: int
    flops: int


def cut_component(
    component: Component,
    price: Fraction | None = None,
    *,
    forward: Iterable[int] = (),
    backward: Iterable[int] = (),
) -> Cut:
    """The minimum cut of `component` closest to the sink.

    Args:
        price: weight of one recomputed FLOP; None: no priced operation is recomputed.
        forward: vertices that must be on the source's side.
        backward: vertices that must be on the sink's side.
    """
    scale = 1 if price is None else price.denominator
    edges: list[tuple[int, int, int | None]] = [
        (t, h, None if c is None else c * scale) for t, h, c in component.edges
    ]
    for vertex, flops in component.prices:
        edges.append((SOURCE, vertex, None if price is None else flops * price.numerator))
    edges += [(SOURCE, vertex, None) for vertex in forward]
    edges += [(vertex, SINK, None) for vertex in backward]
    return _measure(component, _sink_side(component.size, edges))


def cuts_by_price(component: Component) -> list[Cut]:
    """The cuts that are minimal at some price, from no recomputation at a price down to a price of zero.

    Along the list weights fall, FLOPs grow, and the sink's sides are nested (Gallo, Grigoriadis and Tarjan 1989): a
    cheaper FLOP never makes it worthwhile to save again what was recomputed. The prices at which the cut changes are
    found by the secant method of Eisner and Severance (1976).
    """
    first = cut_component(component)
    if not component.prices:
        return [first]
    last = cut_component(component, Fraction(0))
    if last.weight == first.weight:
        return [first]
    return [first, *_between(component, first, last), last]


def cut_within(component: Component, dear: Cut, cheap: Cut, price: Fraction, weight: int) -> Cut:
    """A cut between two neighbours of `cuts_by_price` that weighs no more than `weight`, which `cheap` does not.

    Vertices that change sides between the two are released one after the other, in graph order; with each, the
    minimum cut at `price` grows, its FLOPs do not fall, and its weight plus price times FLOPs does not rise, so neither
    does its weight. The first that fits is found by bisection: a larger allowance never gets a larger cut.

    Args:
        price: one at which `cheap` is the only minimum cut.
    """
    changing = sorted(cheap.backward - dear.backward)
    fixed = [vertex for vertex in range(component.size) if vertex not in cheap.backward]
    best, released, too_few = cheap, len(changing), 0
    while released - too_few > 1:
        middle = (released + too_few) // 2
        cut = cut_component(
            component, price, forward=fixed + changing[middle:], backward=sorted(dear.backward)
        )
        if cut.weight <= weight:
            best, released = cut, middle
        else:
            too_few = middle
    return best


def _between(component: Component, dear: Cut, cheap: Cut) -> list[Cut]:
    """Cuts strictly between two, on the lower convex hull of weight over FLOPs."""
    price = Fraction(dear.weight - cheap.weight, cheap.flops - dear.flops)
    middle = cut_component(component, price)
    if middle.weight + price * middle.flops == dear.weight + price * dear.flops:
        return []
    return [*_between(component, dear, middle), middle, *_between(component, middle, cheap)]


def _measure(component: Component, backward: frozenset[int]) -> Cut:
    weight = 0
    for tail, head, capacity in component.edges:
        if _forward(tail, backward) and not _forward(head, backward):
            assert capacity is not None, "a cut crosses an edge without bound"
            weight += capacity
    flops = sum(flops for vertex, flops in component.prices if vertex in backward)
    return Cut(backward, weight, flops)


def _forward(vertex: int, backward: frozenset[int]) -> bool:
    return vertex == SOURCE or (vertex != SINK and vertex not in backward)


def _sink_side(size: int, edges: list[tuple[int, int, int | None]]) -> frozenset[int]:
    """Vertices that can still reach the sink once a maximum flow runs."""
    if size == 1 and all(c is not None for _, _, c in edges):
        into = sum(c or 0 for t, _, c in edges if t == SOURCE)
        out = sum(c or 0 for _, h, c in edges if h == SINK)
        return frozenset([0]) if into < out else frozenset()
    network = nx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    bound = 1 + sum(c for _, _, c in edges if c is not None)
    for tail, head, capacity in edges:
        amount = bound if capacity is None else capacity
        if network.has_edge(tail, head):
            amount += network[tail][head]["capacity"]
        network.add_edge(tail, head, capacity=amount)
    residual = preflow_push(network, SOURCE, SINK, value_only=True)
    seen, stack = {SINK}, [SINK]
    while stack:
        vertex = stack.pop()
        for tail, edge in residual.pred[vertex].items():
            if tail not in seen and edge["flow"] < edge["capacity"]:
                seen.add(tail)
                stack.append(tail)
    return frozenset(seen - {SINK})
