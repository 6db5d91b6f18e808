"""A pass that makes nodes with plain FX keeps their provenance."""

import torch
from torch import nn

import fxpasses
from fxpasses import PassManager, graph_pass
from fxpasses.graphs.provenance import provenance

aten = torch.ops.aten


@graph_pass(numerics="tolerance")
def spelt_out(gm):
    """silu(x) is x * (1 / (1 + exp(-x)))."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.silu.default):
        x = node.args[0]
        with gm.graph.inserting_before(node):
            negative = gm.graph.call_function(aten.neg.default, (x,))
            exp = gm.graph.call_function(aten.exp.default, (negative,))
            total = gm.graph.call_function(aten.add.Tensor, (exp, 1))
            inverse = gm.graph.call_function(aten.reciprocal.default, (total,))
            new = gm.graph.call_function(aten.mul.Tensor, (x, inverse))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    return True


@graph_pass(numerics="none")
def wider(gm):
    """Every product is of the rounded weight."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        with gm.graph.inserting_before(node):
            node.update_arg(1, gm.graph.call_function(aten.round.default, (node.args[1],)))
    return True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.act = nn.SiLU()

    def forward(self, x):
        hidden = x.sin()
        return self.act(self.inner(hidden))


def graph_after(item):
    captured = fxpasses.capture(Model(), torch.ones(2, 3), passes=[], decompose=False)
    (run,) = PassManager([item]).run(captured.forward, "inference")
    return [node for node in captured.forward.graph.nodes if node.name in run.added]


def test_calls_that_replace_a_call_have_its_provenance():
    added = graph_after(spelt_out)
    assert len(added) == 5
    assert {provenance(node).module for node in added} == {"act"}
    assert all(provenance(node).code == "return self.act(self.inner(hidden))" for node in added)


def test_a_call_between_two_has_that_of_its_argument():
    (added,) = graph_after(wider)
    assert provenance(added).code == "hidden = x.sin()"
    assert "val" in added.meta
