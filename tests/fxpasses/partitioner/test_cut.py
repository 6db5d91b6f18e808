"""Cuts of small networks against all cuts there are, and chains of cuts."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from fxpasses.partitioner.budget import chain_of_cuts, cut_component, cuts_by_price
from fxpasses.partitioner.flow_graph import BACKWARD, SINK, SOURCE, UNDECIDED, Component, Network, Occurrence

SIZE = 5


@st.composite
def components(draw: st.DrawFn) -> Component:
    """Acyclic networks in which every vertex has an edge of bounded capacity into the sink's side."""
    capacity = st.one_of(st.none(), st.integers(0, 6))
    edges: dict[tuple[int, int], int | None] = {}
    for tail, head in itertools.combinations(range(SIZE), 2):
        if draw(st.booleans()):
            edges[tail, head] = draw(capacity)
    for vertex in range(SIZE):
        if draw(st.booleans()):
            edges[vertex, SINK] = draw(st.integers(0, 9))
        if draw(st.booleans()):
            edges[SOURCE, vertex] = draw(st.integers(0, 9))
    prices = tuple((v, draw(st.integers(1, 5))) for v in range(SIZE) if draw(st.booleans()))
    return Component(SIZE, tuple((t, h, c) for (t, h), c in edges.items()), prices)


def every_cut(component: Component, price: Fraction | None) -> dict[frozenset[int], Fraction]:
    """The value of each possible cut; those across an edge without bound are left out."""
    values = {}
    for sides in itertools.product((False, True), repeat=component.size):
        backward = frozenset(v for v, side in enumerate(sides) if side)
        value: Fraction | None = Fraction(0)
        edges = [
            *component.edges,
            *((SOURCE, v, None if price is None else f * price) for v, f in component.prices),
        ]
        for tail, head, capacity in edges:
            crosses = (tail == SOURCE or tail not in backward) and (head == SINK or head in backward)
            if crosses and value is not None:
                value = None if capacity is None else value + capacity
        if value is not None:
            values[backward] = value
    return values


@settings(max_examples=150, deadline=None)
@given(components(), st.one_of(st.none(), st.fractions(0, 4, max_denominator=5)))
def test_cut_is_minimal_and_closest_to_the_sink(component: Component, price: Fraction | None) -> None:
    values = every_cut(component, price)
    least = min(values.values())
    closest = frozenset.intersection(*(side for side, value in values.items() if value == least))
    cut = cut_component(component, price)
    assert cut.backward == closest
    assert cut.weight + (price or 0) * cut.flops == least


@settings(max_examples=100, deadline=None)
@given(components())
def test_cheaper_flops_recompute_more_and_save_less(component: Component) -> None:
    cuts = cuts_by_price(component)
    assert cuts[0] == cut_component(component)
    assert cuts[-1].weight == cut_component(component, Fraction(0)).weight
    for dear, cheap in itertools.pairwise(cuts):
        assert dear.backward < cheap.backward
        assert dear.weight > cheap.weight
        assert dear.flops < cheap.flops


@settings(max_examples=60, deadline=None)
@given(components(), components())
def test_no_price_is_missed(first: Component, second: Component) -> None:
    """At any price, the best cut on the list is the best cut there is."""
    for component in (first, second):
        cuts = cuts_by_price(component)
        for price in (Fraction(1, 3), Fraction(1), Fraction(5, 2)):
            best = min(every_cut(component, price).values())
            assert min(cut.weight + price * cut.flops for cut in cuts) == best


@settings(max_examples=60, deadline=None)
@given(components(), components())
def test_chain_is_nested_and_ordered_by_gain(first: Component, second: Component) -> None:
    occurrences = [
        Occurrence(c, tuple((SIZE * k + v, v) for v in range(SIZE)))
        for k, c in enumerate((first, second, first))
    ]
    network = Network(bytearray([UNDECIDED]) * (3 * SIZE), occurrences, [])
    chain = chain_of_cuts(network)
    assert chain.weights == sorted(chain.weights, reverse=True)
    before: set[int] = set()
    for steps in range(len(chain.steps) + 1):
        now = {v for v, side in enumerate(chain.sides_after(steps)) if side == BACKWARD}
        assert before <= now
        before = now
    for weight in (*chain.weights, chain.weights[-1] - 1, chain.weights[0] + 1):
        steps = chain.steps_within(weight)
        assert steps == len(chain.steps) or chain.weights[steps] <= weight
        assert steps == 0 or chain.weights[steps - 1] > weight
    before = set()
    for weight in range(chain.weights[0], chain.weights[-1] - 1, -1):
        now = {v for v, side in enumerate(chain.sides_within(weight)) if side == BACKWARD}
        assert before <= now, "a smaller allowance recomputes more, between the steps as well"
        assert weight_of(occurrences, now) <= weight
        before = now


def weight_of(occurrences: list[Occurrence], backward: set[int]) -> int:
    """What a cut of several components saves, from their edges."""
    total = 0
    for occurrence in occurrences:
        global_of = {local: vertex for vertex, local in occurrence.vertices}
        for tail, head, capacity in occurrence.component.edges:
            leaves = tail == SOURCE or global_of[tail] not in backward
            arrives = head == SINK or global_of[head] in backward
            if leaves and arrives:
                assert capacity is not None
                total += capacity
    return total


def test_repeated_components_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "fxpasses.partitioner.budget.cuts_by_price", lambda c: calls.append(c) or cuts_by_price(c)
    )
    component = Component(1, ((0, SINK, 5),), ((0, 3),))
    occurrences = [Occurrence(component, ((k, 0),)) for k in range(4)]
    chain = chain_of_cuts(Network(bytearray(4), occurrences, []))
    assert len(calls) == 1
    assert chain.steps == [0, 1, 2, 3]
    assert chain.weights == [20, 15, 10, 5, 0]
