"""Exponentials of sums of logarithms are products, with their signs."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses.exact import equivalent
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.fields import LEVELS, field
from fxpasses.exact.products import product_over

X = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) + 0.2


def recurrence(a, b):
    state, found = torch.zeros(3), []
    for step in range(5):
        state = a[:, step].sigmoid() * state + b[:, step]
        found.append(state)
    return torch.stack(found, 1)


def in_parallel(a, b):
    decay = functional.logsigmoid(a).cumsum(1)
    between = (decay[:, :, None] - decay[:, None]).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    return (between.exp() * b[:, None]).sum(-1)


def shifted(a, b):
    decay = functional.pad(functional.logsigmoid(a), (1, 0))[:, :5].cumsum(1)
    between = (decay[:, :, None] - decay[:, None]).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    return (between.exp() * b[:, None]).sum(-1)


PAIRS = {
    "a recurrence": (recurrence, in_parallel, shifted),
    "a product": (
        lambda x, y: x.log().sum(-1).exp() * y.sum(),
        lambda x, y: x.prod(-1) * y.sum(),
        lambda x, y: x[:, 1:].prod(-1) * y.sum(),
    ),
    "running products": (
        lambda x, y: (x.log().cumsum(0) + y).exp(),
        lambda x, y: x.cumprod(0) * y.exp(),
        lambda x, y: x.cumprod(1) * y.exp(),
    ),
    "powers": (
        lambda x, y: (3 * x.log() - y.log() * 2).exp(),
        lambda x, y: x**3 / y.square(),
        lambda x, y: x**2 / y.square(),
    ),
    "a likelihood": (
        lambda x, y: x.log_softmax(-1).sum(0).exp() * y,
        lambda x, y: x.softmax(-1).prod(0) * y,
        lambda x, y: x.softmax(0).prod(0) * y,
    ),
}


def in_order(f):
    """All inputs are taken, in their order."""
    return lambda *inputs: (*(value * 2 for value in inputs), f(*inputs))


@pytest.mark.parametrize("name", PAIRS)
def test_they_are_proved(name):
    inputs = [X.clone().requires_grad_(), (X + 0.1).requires_grad_()]
    before, right, wrong = (fxpasses.capture(in_order(f), *inputs).joint for f in PAIRS[name])
    last = before.graph.find_nodes(op="placeholder")[2:]
    values = [*inputs, *(torch.randn(node.meta["val"].shape) for node in last)]
    assert equivalent(before, right, values).kind == "EQUAL"
    assert equivalent(before, wrong, values).kind == "DIFFERENT"


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("size", [(3, 0, 2), (3, 1, 2), (2, 7, 3), (4, 3)])
def test_products_over_dimensions(size, keepdim):
    m = Arithmetic(field(0))
    whole = torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(0)).double()
    for over in ([1], [0, 1], [-1]):
        expected = whole
        for dim in sorted((d % len(size) for d in over), reverse=True):
            expected = expected.prod(dim, keepdim)
        found = product_over(m, m.dual(whole), over, keepdim)
        assert torch.equal(found.witness, expected)
        assert all(torch.equal(found.residues[k], m.dual(expected).residues[k]) for k in range(LEVELS))
