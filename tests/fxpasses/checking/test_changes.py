"""Changed subgraphs of two graphs, and the calls between their calls."""

from __future__ import annotations

import torch
from torch import fx

from fxpasses.checking.comparison.values import Reference, compare
from fxpasses.checking.comparison.windows import changed_nodes, changes, cut

aten = torch.ops.aten


def graph(build):
    """A graph module of named calls: ``build`` is given a function that adds one."""
    made = fx.Graph()
    values = [made.placeholder(name) for name in "abcde"]

    def call(name, target, *args):
        return made.create_node("call_function", target, args, {}, name)

    made.output(tuple(build(call, *values)))
    return fx.GraphModule(torch.nn.Module(), made)


def scaled_then_masked(call, a, b, c, d, e):
    difference = call("difference", aten.sub.Tensor, a, call("product", aten.mul.Tensor, b, c))
    scaled = call("scaled", aten.mul.Tensor, d, difference)
    return scaled, call("masked", aten.mul.Tensor, scaled, e)


def otherwise(call, a, b, c, d, e):
    """The product the other way around, and the mask before the scale; ``scaled`` stays for its other user."""
    difference = call("difference", aten.sub.Tensor, a, call("flipped", aten.mul.Tensor, c, b))
    scaled = call("scaled", aten.mul.Tensor, d, difference)
    inner = call("inner", aten.mul.Tensor, difference, e)
    return scaled, call("masked", aten.mul.Tensor, d, inner)


def test_an_unchanged_call_between_changed_ones_runs_along():
    before, after = graph(scaled_then_masked), graph(otherwise)
    (change,) = changes(before, after, changed_nodes(before, after))
    assert change.before == {"product", "difference", "scaled", "masked"}
    assert change.after == {"flipped", "difference", "inner", "masked"}
    assert set(change.outputs) >= {("masked", "masked"), ("difference", "difference")}


def test_a_call_between_in_both_graphs_stays_outside():
    def chain(first, last):
        def build(call, a, b, c, d, e):
            start = call("start", first, a, b)
            middle = call("middle", aten.sin.default, start)
            return [call("end", last, middle, start)]

        return graph(build)

    before, after = chain(aten.add.Tensor, aten.mul.Tensor), chain(aten.sub.Tensor, aten.div.Tensor)
    (change,) = changes(before, after, changed_nodes(before, after))
    assert change.before == change.after == {"start", "end"}


def test_rounding_that_leaves_a_place_and_comes_back_is_no_fault():
    torch.manual_seed(0)
    b, c = torch.randn(4000) * 30, torch.randn(4000)
    d, e = torch.rand(4000) + 0.5, torch.rand(4000) + 0.5
    a = b * c * (1 + 1e-5 * torch.randn(4000))  # the difference has few digits left

    def reassociated(call, a, b, c, d, e):
        # b * c as (b * 3) * (c / 3), which rounds otherwise
        pair = call("thrice", aten.mul.Tensor, b, 3.0), call("third", aten.div.Tensor, c, 3.0)
        difference = call("difference", aten.sub.Tensor, a, call("again", aten.mul.Tensor, *pair))
        scaled = call("scaled", aten.mul.Tensor, d, difference)
        inner = call("inner", aten.mul.Tensor, difference, e)
        return scaled, call("masked", aten.mul.Tensor, d, inner)

    before, after = graph(scaled_then_masked), graph(reassociated)
    reference, names = Reference(before, [a, b, c, d, e]), ["scaled", "masked", *"abcde"]
    assert compare(reference, after, names) == []

    def wrong(call, a, b, c, d, e):
        scaled, masked = reassociated(call, a, b, c, d, e)
        return scaled, call("more", aten.mul.Tensor, masked, 1.2)

    (found,) = compare(reference, graph(wrong), names)
    assert (found.value, found.position) == ("masked", 1)


def test_a_call_that_is_left_behind_is_changed():
    """A pass replaces it, and does not erase it."""

    def before(call, a, b, c, d, e):
        return (call("mask", aten.le.Scalar, a, 0),)

    def after(call, a, b, c, d, e):
        call("mask", aten.le.Scalar, a, 0)
        return (call("other", aten.lt.Scalar, b, 0),)

    assert changed_nodes(graph(before), graph(after)) == ({"mask", "output"}, {"other", "output"})

    def idle(call, a, b, c, d, e):
        call("nobody", aten.neg.default, a)
        return before(call, a, b, c, d, e)

    assert changed_nodes(graph(before), graph(idle)) == (set(), set())


def test_a_window_reaches_back_to_what_both_sides_are_computed_from_and_no_further():
    def build(end):
        def calls(call, a, b, c, d, e):
            start = call("start", aten.add.Tensor, a, b)
            inner = call("inner", aten.neg.default, call("middle", aten.sin.default, start))
            return inner, call("end", aten.mul.Tensor, *((inner, c) if end == "inner" else (start, c)))

        return graph(calls)

    before, after = build("inner"), build("start")
    (change,) = changes(before, after, changed_nodes(before, after))
    names = [node.name for gm in (before, after) for node in gm.graph.nodes]
    window = cut(before, after, change, dict.fromkeys(names, torch.ones(2)))
    taken = [node.name for node in window.before.graph.find_nodes(op="placeholder")]
    assert sorted(taken) == ["c", "start"]
