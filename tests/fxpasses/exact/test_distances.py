"""Distances of points, lengths that are normalized, pooling into windows of several sizes, sums of products: their gradients, too."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses.exact import equivalent

FIRST, SECOND = torch.triu_indices(5, 5, 1)


def made(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).requires_grad_()


def apart(a, b):
    return (a[:, None] - b[None]).square().sum(-1).sqrt()


def windows(x, size):
    rows = [(at * x.shape[-1] // size, -(-(at + 1) * x.shape[-1] // size)) for at in range(size)]
    return torch.stack(
        [torch.stack([x[..., a:b, c:d].amax((-2, -1)) for c, d in rows], -1) for a, b in rows], -2
    )


def normalized(v, g, dim):
    return torch._weight_norm(v, g, dim)


def pairs(x, size):
    first, second = torch.triu_indices(5, 5, 1)
    return size(x[first] - x[second])


PAIRS = {
    "between two sets": (
        [made(4, 3), made(5, 3) + 1],
        lambda a, b: torch.cdist(a, b),
        apart,
        lambda a, b: apart(b, a).t().flip(0),
    ),
    "between two sets, by their products": (
        [made(4, 3), made(5, 3) + 1],
        lambda a, b: torch.cdist(a, b),
        lambda a, b: (a.square().sum(-1)[:, None] - 2 * a @ b.t() + b.square().sum(-1)).sqrt(),
        lambda a, b: (a.square().sum(-1)[:, None] - a @ b.t() + b.square().sum(-1)).abs().sqrt(),
    ),
    "city blocks": (
        [made(4, 3), made(5, 3) + 1],
        lambda a, b: torch.cdist(a, b, p=1.0),
        lambda a, b: (a[:, None] - b[None]).abs().sum(-1),
        lambda a, b: (a[:, None] - b[None]).abs().amax(-1),
    ),
    "inside of one set": (
        [made(5, 3)],
        lambda x: functional.pdist(x),
        lambda x: pairs(x, lambda d: d.square().sum(-1).sqrt()),
        lambda x: pairs(x, lambda d: d.abs().sum(-1)),
    ),
    "city blocks inside of one set": (
        [made(5, 3)],
        lambda x: functional.pdist(x, 1.0),
        lambda x: pairs(x, lambda d: d.abs().sum(-1)),
        lambda x: pairs(x, lambda d: d.abs().sum(-1)).flip(0),
    ),
    "a normalized weight": (
        [made(4, 3), made(4, 1)],
        lambda v, g: normalized(v, g, 0).sin(),
        lambda v, g: (v * (g / v.norm(dim=1, keepdim=True))).sin(),
        lambda v, g: (v * (g / v.norm())).sin(),
    ),
    "a normalized kernel": (
        [made(4, 3, 2), made(1, 3, 1)],
        lambda v, g: normalized(v, g, 1).sin(),
        lambda v, g: (g * v / v.square().sum((0, 2), keepdim=True).sqrt()).sin(),
        lambda v, g: (g * v / v.square().sum((0, 2), keepdim=True)).sin(),
    ),
    "the largest of windows": (
        [made(2, 3, 7, 7)],
        lambda x: functional.adaptive_max_pool2d(x, 3),
        lambda x: windows(x, 3),
        lambda x: windows(x.flip(-1), 3),
    ),
    "the largest of all": (
        [made(2, 3, 4, 4)],
        lambda x: functional.adaptive_max_pool2d(x, 1),
        lambda x: x.flatten(2).max(-1).values[..., None, None],
        lambda x: x.flatten(2).mean(-1)[..., None, None],
    ),
    "a sum of products": (
        [made(3, 2), made(4, 3, 5), made(4, 5, 2)],
        lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2),
        lambda c, a, b: c / 2 + 2 * torch.einsum("bij,bjk->ik", a, b),
        lambda c, a, b: c / 2 + 2 * a.sum(0) @ b.sum(0),
    ),
}


def in_order(f):
    """All inputs are taken, in their order."""
    return lambda *inputs: (*(value * 2 for value in inputs), f(*inputs))


@pytest.mark.parametrize("name", PAIRS)
def test_they_are_what_they_are_made_of(name):
    inputs, *functions = PAIRS[name]
    inputs = [value.detach().requires_grad_() for value in inputs]
    before, right, wrong = (fxpasses.capture(in_order(f), *inputs).joint for f in functions)
    last = before.graph.find_nodes(op="placeholder")[len(inputs) :]
    values = [*inputs, *(torch.randn(node.meta["val"].shape) for node in last)]
    proved = equivalent(before, right, values)
    assert (proved.kind, list(proved.opaque)) == ("EQUAL", []), str(proved)
    assert equivalent(before, wrong, values).kind == "DIFFERENT"
