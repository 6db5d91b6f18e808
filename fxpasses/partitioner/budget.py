"""From a memory budget to a cut: the fewest recomputed FLOPs within it, along one fixed chain of cuts.

Every component has a list of cuts, from no priced recomputation down to the fewest bytes. Each step of a list
recomputes more and saves less. The steps of all components, ordered by bytes freed per FLOP (most first),
form one chain of cuts of the whole graph. Within a component that order is the order of its list (a convex
hull), so that every prefix of the chain is a cut. A budget selects the shortest prefix that fits, and only as
much of its last step as it needs (`cut_within`). All these cuts are nested: a smaller budget recomputes a
superset and saves no more bytes, whatever the model.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from fractions import Fraction

import networkx as nx
from networkx.algorithms.flow import preflow_push

from fxpasses.partitioner.flow_graph import BACKWARD, FORWARD, SINK, SOURCE, Component, Network


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of one component.

    Attributes:
        backward: the vertices on the sink's side: values recomputed or needed in the backward pass.
        weight: the weight of the values that it saves, as in `flow_graph.save_weights`.
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
    """Compute the minimum cut of `component` that is closest to the sink.

    Args:
        price: the weight of one recomputed FLOP. With None, no priced operation is recomputed.
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
    """Compute the cuts that are minimal at some price, from no priced recomputation down to a price of zero.

    Along the list, weights fall, FLOPs grow, and the sink's sides are nested (Gallo, Grigoriadis and Tarjan
    1989): a cheaper FLOP never makes it worthwhile to save again what was recomputed. The prices at which the
    cut changes are found by the secant method of Eisner and Severance (1976).
    """
    first = cut_component(component)
    if not component.prices:
        return [first]
    last = cut_component(component, Fraction(0))
    if last.weight == first.weight:
        return [first]
    return [first, *_hull_between(component, first, last), last]


def cut_within(component: Component, high_price: Cut, low_price: Cut, price: Fraction, weight: int) -> Cut:
    """Find a cut between two neighbors of `cuts_by_price` that weighs at most `weight`, as `low_price` does.

    The vertices that change sides between the two are released one after the other, in graph order. With
    each, the minimum cut at `price` grows, its FLOPs do not fall, and its weight plus price times FLOPs does
    not rise, so its weight does not rise either. Bisection finds the first cut that fits: a larger allowance
    never gets a larger cut.

    Args:
        price: a price at which `low_price` is the only minimum cut.
    """
    changing = sorted(low_price.backward - high_price.backward)
    fixed = [vertex for vertex in range(component.size) if vertex not in low_price.backward]
    best, released, too_few = low_price, len(changing), 0
    while released - too_few > 1:
        middle = (released + too_few) // 2
        cut = cut_component(
            component, price, forward=fixed + changing[middle:], backward=sorted(high_price.backward)
        )
        if cut.weight <= weight:
            best, released = cut, middle
        else:
            too_few = middle
    return best


def _hull_between(component: Component, high_price: Cut, low_price: Cut) -> list[Cut]:
    """The cuts strictly between two others, on the lower convex hull of weight over FLOPs."""
    price = Fraction(high_price.weight - low_price.weight, low_price.flops - high_price.flops)
    middle = cut_component(component, price)
    if middle.weight + price * middle.flops == high_price.weight + price * high_price.flops:
        return []
    return [
        *_hull_between(component, high_price, middle),
        middle,
        *_hull_between(component, middle, low_price),
    ]


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
    """The vertices that can still reach the sink under a maximum flow."""
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


@dataclasses.dataclass(frozen=True)
class Chain:
    """The chain of cuts of a whole network.

    Attributes:
        network: the network.
        cuts: for each occurrence of the network, the cuts of its component.
        steps: occurrences, in the order in which they move on to their next cut.
        weights: the weight of the values that the undecided part saves after each number of steps.
    """

    network: Network
    cuts: list[list[Cut]]
    steps: list[int]
    weights: list[int]

    @property
    def flops(self) -> list[int]:
        """FLOPs of the priced operations that are recomputed after each number of steps."""
        position = [0] * len(self.cuts)
        flops = [sum(options[0].flops for options in self.cuts)]
        for occurrence in self.steps:
            before, after = self.cuts[occurrence][position[occurrence] :][:2]
            position[occurrence] += 1
            flops.append(flops[-1] + after.flops - before.flops)
        return flops

    def sides_within(self, weight: int) -> bytearray:
        """The sides of the first cut that saves at most `weight`, or of the last cut if none does.

        The step that reaches it is taken only as far as needed.
        """
        steps = self.steps_within(weight)
        cuts = self._cuts_after(steps)
        if steps > 0 and self.weights[steps] < weight:
            occurrence = self.steps[steps - 1]
            component, low_price, options = (
                self.network.occurrences[occurrence].component,
                cuts[occurrence],
                self.cuts[occurrence],
            )
            reached = options.index(low_price)
            gains = [_gain(*pair) for pair in itertools.pairwise(options[reached - 1 : reached + 2])]
            price = (gains[0] + (gains[1] if len(gains) == 2 else 0)) / 2
            allowed = weight - (self.weights[steps] - low_price.weight)
            cuts[occurrence] = cut_within(component, options[reached - 1], low_price, price, allowed)
        return _sides(self.network, cuts)

    def sides_after(self, steps: int) -> bytearray:
        """The side of each vertex after that many steps."""
        return _sides(self.network, self._cuts_after(steps))

    def _cuts_after(self, steps: int) -> list[Cut]:
        position = [0] * len(self.cuts)
        for occurrence in self.steps[:steps]:
            position[occurrence] += 1
        return [cuts[k] for cuts, k in zip(self.cuts, position, strict=True)]

    def steps_within(self, weight: int) -> int:
        """The number of steps until at most `weight` is saved, or all steps if it never fits."""
        for steps, reached in enumerate(self.weights):
            if reached <= weight:
                return steps
        return len(self.steps)


def cut_without_price(network: Network) -> bytearray:
    """The minimum cut of a network without priced operations."""
    known: dict[Component, Cut] = {}
    for occurrence in network.occurrences:
        if occurrence.component not in known:
            known[occurrence.component] = cut_component(occurrence.component)
    return _sides(network, [known[occurrence.component] for occurrence in network.occurrences])


def chain_of_cuts(network: Network) -> Chain:
    """Compute all cuts of `network`, ordered by bytes freed per FLOP. Ties go to the earlier occurrence.

    Recomputing early parts first keeps the peak low: the backward pass reaches them last, when other values
    are gone.
    """
    known: dict[Component, list[Cut]] = {}
    for occurrence in network.occurrences:
        if occurrence.component not in known:
            known[occurrence.component] = cuts_by_price(occurrence.component)
    cuts = [known[occurrence.component] for occurrence in network.occurrences]
    steps = []
    for number, options in enumerate(cuts):
        for before, after in itertools.pairwise(options):
            steps.append((-_gain(before, after), number, before.weight - after.weight))
    steps.sort(key=lambda step: step[:2])
    weights = [sum(options[0].weight for options in cuts)]
    for _, _, freed in steps:
        weights.append(weights[-1] - freed)
    return Chain(network, cuts, [number for _, number, _ in steps], weights)


def _gain(before: Cut, after: Cut) -> Fraction:
    """Weight freed per FLOP."""
    return Fraction(before.weight - after.weight, after.flops - before.flops)


def _sides(network: Network, cuts: list[Cut]) -> bytearray:
    side = bytearray(network.side)
    for occurrence, cut in zip(network.occurrences, cuts, strict=True):
        for vertex, local in occurrence.vertices:
            side[vertex] = BACKWARD if local in cut.backward else FORWARD
    return side
