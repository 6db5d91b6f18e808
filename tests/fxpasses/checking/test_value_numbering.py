"""Equal calls of equal values are one value: what a rewrite may have changed, and what it cannot have."""

import operator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from fxpasses.checking.comparison.carried import CarriedValues, Step
from fxpasses.checking.comparison.values import Reference, compare, value_names
from fxpasses.checking.comparison.windows import changed_nodes, changed_values

aten = torch.ops.aten
X = torch.linspace(-1.5, 1.5, 6).view(2, 3)
_NOTHING: tuple[set[str], set[str]] = (set(), set())


def graph(build):
    """A graph of one input, of calls whose names are chosen."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = X

    def call(name, target, *args):
        node = made.create_node("call_function", target, args, {}, name)
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        assert node.name == name
        return node

    made.output(build(call, x))
    return fx.GraphModule({}, made)


def mismatches(before, after):
    return compare(Reference(before, [X]), after, value_names(before, "inference"))


def twice(call, x):
    a, b = call("a", aten.sin.default, x), call("b", aten.sin.default, x)
    return (call("c", aten.add.Tensor, a, b), call("d", aten.cos.default, b))


def once(call, x):
    b = call("b", aten.sin.default, x)
    return (call("c", aten.add.Tensor, b, b), call("d", aten.cos.default, b))


def other_names(call, x):
    e, f = call("e", aten.sin.default, x), call("f", aten.sin.default, x)
    return (call("c", aten.add.Tensor, e, f), call("d", aten.cos.default, e))


@pytest.mark.parametrize("after", [once, other_names])
def test_what_is_computed_once_or_again_is_the_same_value(after):
    one, other = graph(twice), graph(after)
    assert any(changed_nodes(one, other))
    old, new = changed_values(one, other)
    assert not old
    assert new <= {"e", "f"}  # calls without namesakes
    for a, b in ((one, other), (other, one)):
        assert mismatches(a, b) == []
        assert CarriedValues([X]).agrees(Step(a, b, bitwise=True))


def test_exchanged_names_hide_nothing():
    def before(call, x):
        a, b = call("a", aten.sin.default, x), call("b", aten.cos.default, x)
        return (call("c", aten.neg.default, a), call("d", aten.abs.default, b))

    def exchanged(call, x):
        a, b = call("a", aten.cos.default, x), call("b", aten.sin.default, x)
        return (call("c", aten.neg.default, b), call("d", aten.abs.default, a))

    def wrong(call, x):
        a, b = call("a", aten.cos.default, x), call("b", aten.sin.default, x)
        return (call("c", aten.neg.default, a), call("d", aten.abs.default, b))

    assert mismatches(graph(before), graph(exchanged)) == []
    assert {found.position for found in mismatches(graph(before), graph(wrong))} == {0, 1}
    assert not CarriedValues([X]).agrees(Step(graph(before), graph(wrong), bitwise=False))


def test_a_value_that_moved_to_another_name_does_not_hide_what_took_its_own():
    def before(call, x):
        n = call("n", aten.sin.default, x)
        return (call("u", aten.neg.default, n), n)

    def after(call, x):
        k, n = call("k", aten.sin.default, x), call("n", aten.tan.default, x)
        return (call("u", aten.neg.default, n), k)

    old, new = changed_values(graph(before), graph(after))
    assert "n" in old & new
    (found,) = mismatches(graph(before), graph(after))
    assert found.position == 0


@pytest.mark.parametrize(
    ("target", "more"),
    [(aten.bernoulli.p, (0.5,)), (aten.empty_like.default, ()), (aten.relu_.default, ())],
    ids=["random", "uninitialised", "written"],
)
def test_calls_that_may_give_something_else_each_time_are_not_one(target, more):
    def apart(call, x):
        y = call("y", aten.clone.default, x)
        return (call("a", target, y, *more), call("b", target, y, *more))

    def together(call, x):
        a = call("a", target, call("y", aten.clone.default, x), *more)
        return (a, a)

    assert any(changed_values(graph(apart), graph(together)))


def test_a_result_of_several_is_taken_apart_once():
    def apart(call, x):
        s, t = call("s", aten.split.Tensor, x, 1), call("t", aten.split.Tensor, x, 1)
        a, b = call("a", operator.getitem, s, 0), call("b", operator.getitem, t, 1)
        return (call("c", aten.sub.Tensor, a, b),)

    def together(call, x):
        s = call("s", aten.split.Tensor, x, 1)
        a, b = call("a", operator.getitem, s, 0), call("b", operator.getitem, s, 1)
        return (call("c", aten.sub.Tensor, a, b),)

    def wrong(call, x):
        s = call("s", aten.split.Tensor, x, 1)
        a, b = call("a", operator.getitem, s, 0), call("b", operator.getitem, s, 0)
        return (call("c", aten.sub.Tensor, a, b),)

    assert changed_values(graph(apart), graph(together)) == _NOTHING
    assert mismatches(graph(apart), graph(wrong))


_UNARY = [aten.sin.default, aten.cos.default, aten.neg.default]
_BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]


@st.composite
def programs(draw):
    """Calls, each of values that were there before, then which values are returned."""
    count = draw(st.integers(2, 7))
    calls = []
    for at in range(count):
        target = draw(st.sampled_from(_UNARY + _BINARY))
        given_values = st.integers(-1, at - 1)
        calls.append((target, [draw(given_values) for _ in range(1 if target in _UNARY else 2)]))
    return calls, draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))


def built(program, names):
    calls, returned = program

    def build(call, x):
        values = []
        for (target, taken), name in zip(calls, names, strict=True):
            values.append(call(name, target, *(x if at < 0 else values[at] for at in taken)))
        return tuple(values[at] for at in returned)

    return graph(build)


@pytest.mark.slow
@given(programs(), programs(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_what_is_not_said_to_be_changed_is_equal(one, other, random):
    """Of random graphs under mixed names: whatever is judged by what changed is judged as whole graphs are."""
    count = min(len(one[1]), len(other[1]))
    one, other = (one[0], one[1][:count]), (other[0], other[1][:count])
    for second in (one, other):
        names = [f"v{at}" for at in range(8)]
        random.shuffle(names)
        before = built(one, [f"v{at}" for at in range(len(one[0]))])
        after = built(second, names[: len(second[0])])
        expected = [
            torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(before(X), after(X), strict=True)
        ]
        wrong = {found.position for found in mismatches(before, after) if found.fault == "value"}
        assert wrong <= {at for at, is_equal in enumerate(expected) if not is_equal}
        assert bool(wrong) is not all(expected)
        agree = CarriedValues([X]).agrees(Step(before, after, bitwise=False))
        assert not agree or all(expected)
