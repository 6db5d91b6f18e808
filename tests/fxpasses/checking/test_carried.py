"""Windows, and values that are carried from rewrite to rewrite: what changed is enough to decide."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from fxpasses.checking.comparison.carried import CarriedValues, Step
from fxpasses.checking.comparison.values import Reference, compare, value_names
from fxpasses.checking.comparison.windows import changed_nodes, changes, cut
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.checking.execution.interpret import Run
from fxpasses.graphs.rewriting import copy_graph

aten = torch.ops.aten


def before(x, w):
    y = (x @ w).sin()
    z = y * 2 + x.sum()
    return z.relu(), y


def graph(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def rewritten(gm, change):
    copy = copy_graph(gm)
    change(copy.graph)
    copy.recompile()
    return copy


def first(graph, target):
    return graph.find_nodes(op="call_function", target=target)[0]


def doubled(graph):
    node = first(graph, aten.mul.Tensor)
    node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])


def trebled(graph):
    first(graph, aten.mul.Tensor).update_arg(1, 3)


def swapped(graph):
    (output,) = graph.find_nodes(op="output")
    output.args = (list(reversed(output.args[0])),)


GIVEN = [torch.randn(3, 3), torch.randn(3, 3)]


def test_values_are_carried_over_a_rewrite_that_keeps_bits():
    gm = graph(before, *GIVEN)
    once = rewritten(gm, doubled)
    twice = rewritten(once, lambda graph: first(graph, aten.add.Tensor).update_arg(1, 0.5))
    steps = [Step(gm, once, bitwise=True)]
    steps.append(Step(once, twice, bitwise=True, last=steps[0]))
    carried = CarriedValues(GIVEN)
    assert carried.agrees(steps[0])
    assert steps[1].follows
    assert not carried.agrees(steps[1])
    values = Run(once, keep=True)
    values(GIVEN)
    assert all(torch.equal(value, carried.before[name]) for name, value in values.values.items())


def test_values_are_carried_over_what_rounds_otherwise():
    def sums(x):
        y = x.sum(0)
        return y.sin(), x.exp()

    x = torch.randn(64, 5)
    gm = graph(sums, x)
    flipped = graph(lambda x: (x.flip(0).sum(0).sin(), x.exp()), x)
    squared = rewritten(
        flipped, lambda graph: setattr(first(graph, aten.exp.default), "target", aten.square.default)
    )
    steps = [Step(gm, flipped, bitwise=False)]
    steps.append(Step(flipped, squared, bitwise=False, last=steps[0]))
    names = value_names(gm, "inference")
    carried = CarriedValues([x])
    assert not carried.agrees(steps[0])
    assert compare(Reference(gm, [x], 0, carried.before), flipped, names) == []
    assert not carried.agrees(steps[1])
    (mismatch,) = compare(Reference(flipped, [x], 0, carried.before), squared, names)
    assert mismatch.position == 1


@pytest.mark.parametrize("bitwise", [False, True])
def test_not_a_number_may_be_lost(bitwise):
    x = torch.tensor([1.0, float("nan")])
    gm, other = graph(lambda x: (x * 2 - x * 2,), x), graph(lambda x: (x * 0,), x)
    zeros = graph(lambda x: (torch.zeros_like(x),), x)
    assert CarriedValues([x]).agrees(Step(gm, other, bitwise))
    assert CarriedValues([x]).agrees(Step(gm, zeros, bitwise)) is not bitwise
    assert not CarriedValues([x]).agrees(Step(zeros, gm, bitwise))
    guarded = graph(lambda x: (x.masked_fill(x.isnan(), 0),), x)
    unguarded = graph(lambda x: (x.masked_fill(torch.full_like(x, False, dtype=torch.bool), 0),), x)
    assert not CarriedValues([x]).agrees(Step(guarded, unguarded, bitwise))


@pytest.mark.parametrize("change", [trebled, swapped])
def test_what_differs_is_not_carried(change):
    gm = graph(before, *GIVEN)
    assert not CarriedValues(GIVEN).agrees(Step(gm, rewritten(gm, change), bitwise=False))


def test_a_graph_that_refuses_its_inputs_says_nothing():
    gm = graph(before, *GIVEN)
    with pytest.raises(Unsupported, match="raises RuntimeError"):
        CarriedValues([torch.randn(3, 4), torch.randn(3, 3)]).agrees(
            Step(gm, rewritten(gm, doubled), bitwise=False)
        )


def test_a_window_is_followed_to_what_both_sides_know():
    """The result of one call instead of the same one, recomputed from what that was made of."""

    def recomputed(x):
        y = x.exp()
        return y.sin(), (x.exp() + 1).cos()

    def kept(x):
        y = x.exp()
        return y.sin(), (y + 1).cos()

    x = torch.randn(4)
    one, other = graph(recomputed, x), graph(kept, x)
    changed = changed_nodes(one, other)
    found = [change for change in changes(one, other, changed) if change.outputs]
    run = Run(one, keep=True)
    run([x])
    windows = [cut(one, other, change, run.values) for change in found]
    assert windows
    for window in windows:
        assert [n.name for n in window.before.graph.find_nodes(op="placeholder")] == ["x_1"]
    assert compare(Reference(one, [x]), other, value_names(one, "inference")) == []


def test_a_branch_that_is_not_taken_is_compared():
    def program(x):
        return torch.cond(x.sum() > 0, lambda y: (y.sin() + 1,), lambda y: (y.sin() - 1,), (x * 2,))[0]

    x = torch.rand(3, 4)
    with torch.no_grad():
        gm = fxpasses.capture(program, x).forward
    names = value_names(gm, "inference")

    def change(target, args):
        copy = copy_graph(gm)
        inner = next(g for name, g in copy.named_children() if "false" in name)
        for node in inner.graph.find_nodes(op="call_function", target=aten.sub.Tensor):
            node.target, node.args = target, (node.args[0], *args)
        inner.recompile()
        return copy

    assert compare(Reference(gm, [x]), change(aten.add.Tensor, [-1]), names) == []
    (mismatch,) = compare(Reference(gm, [x]), change(aten.sub.Tensor, [2]), names)
    assert "which these inputs do not take" in mismatch.problem
    assert mismatch.calls
