"""Ranges of the values of a graph, and what is said of differences that they rule out."""

import pytest
import torch

import fxpasses
from fxpasses import graph_pass
from fxpasses.exact.ranges import ranges
from fxpasses.testing import prove

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.softmax(-1), "lies in [0, 1]"),
        (lambda x: (x.exp() + 1).sum(0), "is at least 0"),
        (lambda x: x.tanh().square() * 3 - 1, "is at least -1"),
        (lambda x: 2 - x.sigmoid() * 4, "lies in [-2, 2]"),
        (lambda x: -x.abs().sqrt(), "is at most 0"),
        (lambda x: torch.where(x > 0, x.cos(), 2.0).mean(0), "lies in [-1, 2]"),
        (lambda x: x.clamp(-3, 4) / (x.abs() + 1), "lies in [-3, 4]"),
        (lambda x: x.amax(-1), ""),
    ],
)
def test_each_value_lies_in_its_range(function, said):
    x = torch.randn(5, 6)
    gm = fxpasses.capture(function, x, decompose=True).forward
    found = ranges(gm)
    run = torch.fx.Interpreter(gm, garbage_collect_values=False)
    run.run(x)
    for node, value in run.env.items():
        if node.name in found:
            assert bool((value >= found[node.name].low).all() and (value <= found[node.name].high).all())
    (returned,) = gm.graph.output_node().args[0]
    assert str(found.get(returned.name, "")) == said


def left_out(target):
    @graph_pass(name="left_out", graphs=("inference",))
    def without(gm):
        """Leave calls out."""
        nodes = gm.graph.find_nodes(op="call_function", target=target)
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return bool(nodes)

    return without


@pytest.mark.parametrize(
    ("target", "model", "why"),
    [
        (aten.clamp_max.default, lambda x: x.softmax(-1).clamp(max=1.0) * 2, "lies in [0, 1]"),
        (aten.abs.default, lambda x: x.exp().abs().sum(-1), "exp is at least 0"),
    ],
)
def test_a_proof_says_why_a_difference_is_not_reachable(target, model, why):
    (site,) = prove(left_out(target), model, torch.randn(4, 6)).sites
    assert site.said == "EQUAL"
    (note,) = site.notes
    assert "not reachable, since" in note
    assert why in str(site)
