"""Where what a graph compares is equal: wrong gradients there are found, and rewrites that are right there are not called wrong."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses.checking.values import Reference
from fxpasses.checking.window_values import at_telling_values
from fxpasses.graphs.rewriting import copy_graph

aten = torch.ops.aten
FLIPPED = {
    aten.le.Scalar: aten.lt.Scalar,
    aten.lt.Scalar: aten.le.Scalar,
    aten.ge.Scalar: aten.gt.Scalar,
    aten.gt.Scalar: aten.ge.Scalar,
    aten.lt.Tensor: aten.le.Tensor,
}
ACTIVATIONS = {
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "clamp": lambda x: x.clamp(-0.1, 2),
    "relu6": functional.relu6,
    "shrinkage": lambda x: functional.hardshrink(x, 0.3),
    "maximum": lambda x: torch.maximum(x, x.detach().roll(1)),
}


def found(before, after, inputs):
    return list(at_telling_values(Reference(before, inputs).rewriting(after)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_comparison_that_takes_the_other_side(name):
    activation = ACTIVATIONS[name]
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(6, 6)
    before = fxpasses.capture(lambda x, w: activation(x @ w), x, w).joint
    compared = [node.name for node in before.graph.nodes if node.target in FLIPPED]
    assert compared
    inputs = [x.detach(), w, torch.randn(3, 6)]
    for name in compared:
        after = copy_graph(before)
        (node,) = [node for node in after.graph.nodes if node.name == name]
        node.target = FLIPPED[node.target]
        assert found(before, after, inputs)
        assert not found(before, copy_graph(before), inputs)


RIGHT = {
    "what is positive": (lambda x, w: (x @ w).exp().relu(), lambda x, w: (x @ w).exp()),
    "a sum of exponentials": (
        lambda x, w: x.exp().sum(-1).clamp_min(1e-9) + w.sum(),
        lambda x, w: x.exp().sum(-1) + w.sum(),
    ),
    "a scale": (lambda x, w: ((x @ w) * 0.3 > 0.9) * x, lambda x, w: ((x @ w) > 3) * x),
    "two branches": (
        lambda x, w: torch.where(x @ w > 0, x @ w, 0.0),
        lambda x, w: torch.where(x @ w >= 0, x @ w, 0.0),
    ),
    "of one source": (lambda x, w: (2 * x > 6) * (x + w[:3]), lambda x, w: (4 * x > 12) * (x + w[:3])),
    "rounding": (lambda x, w: (x @ w).floor(), lambda x, w: -(-(x @ w)).ceil()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    inputs = [torch.randn(3, 6), torch.randn(6, 6)]
    before, after = (fxpasses.capture(f, *inputs).forward for f in RIGHT[name])
    assert not found(before, after, inputs)


def test_rounding_half_up():
    inputs = [torch.randn(3, 6), torch.randn(6, 6)]
    before = fxpasses.capture(lambda x, w: (x @ w).round(), *inputs).forward
    after = fxpasses.capture(lambda x, w: (x @ w + 0.5).floor(), *inputs).forward
    assert found(before, after, inputs)
