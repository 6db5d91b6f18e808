"""Ties of what is scaled, moved or multiplied with a matrix before it is rounded or compared."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses.checking.comparison.values import Reference
from fxpasses.checking.critical.critical_values import at_critical_values
from fxpasses.testing import prove

aten = torch.ops.aten

GENERATOR = torch.Generator().manual_seed(3)
X, S, W = (torch.randn(size, generator=GENERATOR) for size in ((4, 6), (6,), (5, 6)))
SCALE = S.abs() + 0.3
ROUNDED = {
    "a quotient": (lambda x, s, w: (x / s).round() * s, lambda x, s, w: (x / s + 0.5).floor() * s),
    "behind a clamp": (
        lambda x, s, w: ((x / s).round() + 3).clamp(-8, 7) * s,
        lambda x, s, w: ((x / s - 0.5).ceil() + 3).clamp(-8, 7) * s,
    ),
    "a product": (lambda x, s, w: (x * s).round() / s, lambda x, s, w: (x * s + 0.5).floor() / s),
    "moved by another one": (
        lambda x, s, w: ((x - s) / s[:1]).round() * s,
        lambda x, s, w: ((x - s) / s[:1] + 0.5).floor() * s,
    ),
    "of either sign": (
        lambda x, s, w: (x / s).round() * s,
        lambda x, s, w: (x / s + 0.5 * x.sign()).trunc() * s,
    ),
    "steps": (lambda x, s, w: (x / s).floor() * s, lambda x, s, w: ((x / s).ceil() - 1) * s),
    "a threshold": (
        lambda x, s, w: torch.where(x * s > 0.5, x, 0.0),
        lambda x, s, w: torch.where(x * s >= 0.5, x, 0.0),
    ),
    "a linear layer": (
        lambda x, s, w: (functional.linear(x, w) / s[0]).round() * s[0],
        lambda x, s, w: (functional.linear(x, w) / s[0] + 0.5).floor() * s[0],
    ),
    "by its own largest": (
        lambda x, s, w: (x / (x.abs().amax(1, keepdim=True) / 7)).round() * s,
        lambda x, s, w: (x / (x.abs().amax(1, keepdim=True) / 7) + 0.5).floor() * s,
    ),
    "a quantized weight": (
        lambda x, s, w: x @ (w / (w.abs().amax() / 15)).round().clamp(-15, 15).t(),
        lambda x, s, w: x @ (w / (w.abs().amax() / 15) + 0.5).floor().clamp(-15, 15).t(),
    ),
    "scores": (
        lambda x, s, w: ((x[None] @ w.t()[None] + 1) * 4).round() / 4,
        lambda x, s, w: ((x[None] @ w.t()[None] + 1) * 4 + 0.5).floor() / 4,
    ),
}


def takes_all(f):
    """All inputs are taken, in their order."""
    return lambda *inputs: (*(value * 2 for value in inputs), f(*inputs))


def differences(before, after):
    first, second = (fxpasses.capture(takes_all(f), X, SCALE, W).forward for f in (before, after))
    found = at_critical_values(Reference(first, [X, SCALE, W]).rewriting(second))
    return [at.where for at in found if at.differences]


@pytest.mark.parametrize("name", ROUNDED)
def test_ties_are_tried(name):
    assert differences(*ROUNDED[name])


@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_in_another_way_to_the_same_is_right(name):
    before, _ = ROUNDED[name]

    def after(x, s, w):
        return before(x * 2, s * 2, w) / 2 if name in ("a quotient", "steps") else before(x + 0.0, s, w * 1.0)

    assert differences(before, after) == []


@pytest.mark.parametrize("size", [(0, 3), (1, 1)])
def test_few_elements(size):
    def takes(f):
        return fxpasses.capture(takes_all(f), *inputs).forward

    inputs = [torch.randn(size, generator=GENERATOR), torch.tensor(0.7)]
    before, after = takes(lambda x, s: (x / s).round() * s), takes(lambda x, s: (x / s + 0.5).floor() * s)
    found = list(at_critical_values(Reference(before, inputs).rewriting(after)))
    assert bool(found) is (0 not in size)


@fxpasses.graph_pass(graphs=["joint"])
def whole_gradient_at_ties(gm):
    "Wrong on purpose: where two values are equal, each gets half of the gradient."
    found = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=aten.where.self)
        if getattr(node.args[0], "target", None) is aten.eq.Tensor
    ]
    for node in found:
        node.replace_all_uses_with(node.args[2])
        gm.graph.erase_node(node)
    return bool(found)


def test_ties_of_two_computed_values():
    def overlap(size, box):
        return torch.minimum(size.exp() + 1, box[:, :2] + box[:, 2:]).sum()

    torch.manual_seed(0)
    proof = prove(whole_gradient_at_ties, overlap, torch.randn(3, 2, requires_grad=True), torch.rand(3, 4))
    assert not proof.ok
