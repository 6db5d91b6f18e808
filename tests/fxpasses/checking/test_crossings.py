"""A value that a graph computes, at the number that it is compared with: found between inputs on which it lies below and above."""

import pytest
import torch

from fxpasses import claim, graph_pass, pattern_pass
from fxpasses.testing import prove


def overlap(a, b):
    both = torch.minimum(a, b).sum(-1)
    return both / (a.sum(-1) + b.sum(-1) - both)


torch.manual_seed(0)  # each process has the same inputs
VALUES = {
    "a norm": (lambda x: x.norm(dim=-1), torch.randn(5, 3)),
    "distances": (lambda x: torch.cdist(x, x), torch.randn(5, 3)),
    "a quotient": (lambda x, y: x / y, torch.randn(5), torch.randn(5)),
    "a product": (lambda x, y: x * y, torch.randn(5), torch.randn(5)),
    "an overlap": (overlap, torch.rand(4, 3) + 0.1, torch.rand(4, 3) + 0.1),
    "a transpose": (lambda x: (x.t() * 2).tanh().exp() - 1, torch.randn(4, 3)),
    "a cosine": (lambda x, y: torch.cosine_similarity(x, y, dim=-1), torch.randn(5, 3), torch.randn(5, 3)),
    "a mean of squares": (lambda x: x.square().mean(-1), torch.randn(4, 6)),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_other_side_of_a_threshold_is_found(name):
    value, *given = VALUES[name]
    if len(given) == 1:
        before, after = (lambda x: (value(x) >= 0.5) * 1.0, lambda x: (value(x) > 0.5) * 1.0)
    else:
        before, after = (lambda x, y: (value(x, y) >= 0.5) * 1.0, lambda x, y: (value(x, y) > 0.5) * 1.0)
    assert not prove(pattern_pass(before, after, given, name="threshold"), before, *given).ok


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: x.norm(dim=-1) >= 0.5, lambda x: ~(x.norm(dim=-1) < 0.5)),
        (
            lambda x: x.norm(dim=-1) >= 0.5,
            lambda x: x.square().sum(-1) >= 0.25,
        ),  # another value: it rounds otherwise there
        (lambda x: x * (1 / x.norm()).clamp(max=1.0), lambda x: torch.where(x.norm() > 1, x / x.norm(), x)),
        (lambda x: torch.where(x.std() > 0.3, x, -x), lambda x: torch.where(x.std() <= 0.3, -x, x)),
    ],
    ids=["negated", "squared", "clipped", "turned around"],
)
def test_what_is_right_there_is_right(before, after):
    x = torch.randn(5, 3)
    proof = prove(pattern_pass(before, after, [x], name="right"), before, x)
    assert proof.ok, proof


def test_a_value_that_jumps_over_the_number_is_never_there():
    before = lambda x: x.sign().cumsum(-1) > 0.5  # noqa: E731
    after = lambda x: x.sign().cumsum(-1) >= 0.5  # noqa: E731
    x = torch.randn(5, 3)
    proof = prove(pattern_pass(before, after, [x], name="right"), before, x)
    assert proof.ok, proof


def contrast(x, weight, bias, least):
    """Rows divided by their norms. That of a row is never small: the bias keeps it away from zero."""
    rows = torch.tanh(torch.addmm(bias, x, weight))
    rows = rows / least(rows.square().sum(-1, keepdim=True).sqrt())
    return (rows @ rows.t()).logsumexp(-1)


@pytest.mark.parametrize(
    ("other", "is_right"),
    [
        (lambda norm: norm + 1e-12, False),
        (lambda norm: norm, False),
        (lambda norm: norm.clamp(min=1e-6), False),
        (lambda norm: torch.where(norm > 1e-12, norm, 1e-12), True),
        (lambda norm: (norm * 2).clamp(min=2e-12) / 2, True),
    ],
    ids=["added", "left out", "another", "chosen", "doubled"],
)
def test_a_number_far_below_a_value_decides_where_inputs_are_small(other, is_right):
    given = [torch.randn(5, 3), torch.randn(3, 6), torch.randn(6)]
    before = lambda x, weight, bias: contrast(x, weight, bias, lambda norm: norm.clamp(min=1e-12))  # noqa: E731
    after = lambda x, weight, bias: contrast(x, weight, bias, other)  # noqa: E731
    proof = prove(pattern_pass(before, after, given, name="least norm"), before, *given)
    assert proof.ok is is_right, proof


@graph_pass(graphs=["inference"])
def excludes_the_number(gm):
    found = [n for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.ge.Scalar) if claim(n)]
    for node in found:
        node.target = torch.ops.aten.gt.Scalar
    return bool(found)


def areas(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def test_a_value_that_only_the_comparison_takes_is_found():
    def assign(boxes, targets, labels):
        low, high = (
            torch.maximum(boxes[:, None, :2], targets[:, :2]),
            torch.minimum(boxes[:, None, 2:], targets[:, 2:]),
        )
        both = (high - low).clamp(min=0).prod(-1)
        best, which = (both / (areas(boxes)[:, None] + areas(targets) - both)).max(1)
        return torch.where(best >= 0.3, labels[which], 0)

    torch.manual_seed(0)
    corners, others = torch.rand(6, 2) * 6, torch.rand(3, 2) * 6
    boxes = torch.cat([corners, corners + 1 + torch.rand(6, 2) * 3], 1)
    targets = torch.cat([others, others + 2 + torch.rand(3, 2) * 2], 1)
    assert not prove(excludes_the_number, assign, boxes, targets, torch.tensor([1, 3, 2])).ok
