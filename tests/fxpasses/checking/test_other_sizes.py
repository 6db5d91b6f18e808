"""Which other sizes a rewrite is tried at, and how much a graph may hold there."""

import torch

import fxpasses
from fxpasses.checking.critical.critical_inputs import critical_sizes
from fxpasses.checking.execution.inputs import count_elements, placeholders


def test_a_call_that_only_moved_gives_no_sizes():
    def halves(x):
        return x.clamp(max=128).half() + x.clamp(max=128).half().exp()

    before, after = (
        fxpasses.capture(halves, torch.randn(9), passes=passes, decompose=True).forward
        for passes in ([], ["eliminate_common_subexpressions"])
    )
    assert len(after.graph.nodes) < len(before.graph.nodes)
    assert critical_sizes(before, after) == []


def test_the_values_of_a_graph_are_counted_at_other_sizes():
    x = torch.randn(5, 2)
    gm = fxpasses.capture(lambda x: (x @ x.t()).exp(), x, dynamic=True).forward
    rows = placeholders(gm)[-1].meta["val"].shape[0].node.expr
    few, many = (count_elements(gm, {rows: size}) for size in (5, 4000))
    assert 2 * 5**2 <= few <= 4 * 5**2 + 10 * 5
    assert 2 * 4000**2 <= many < 3 * 4000**2
