"""One tensor that arrives at several inputs of what is compiled."""

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import assert_same, dynamo_eager, flat, fresh


def dynamo_symbolic(graph):
    return torch.compile(graph, backend="eager", fullgraph=True, dynamic=True)


class Sum(torch.autograd.Function):
    """Gradients of both arguments are what ``choose`` makes of the gradients of both results."""

    @staticmethod
    def forward(ctx, x, y, choose):
        ctx.choose = choose
        return x + y, y.clone()

    @staticmethod
    def backward(ctx, left, right):
        return *ctx.choose(left, right), None


def steps(sizes, choices):
    """Gradients before and after the function, and whether leaves share memory."""
    for size, choose in zip(sizes, choices, strict=True):
        x, y = (torch.arange(1.0, size + 1, requires_grad=True) for _ in range(2))
        left, right = Sum.apply(x.sin(), y.cos(), choose)
        (left * 2 + right * 3).sum().backward()
        yield x.grad, y.grad, x.grad.data_ptr() == y.grad.data_ptr()
        u, v = (torch.arange(1.0, size + 1, requires_grad=True) for _ in range(2))
        left, right = Sum.apply(u, v, choose)
        (left * 2 + right * 3).sum().backward()
        yield u.grad, v.grad, u.grad.data_ptr() == v.grad.data_ptr()


def left_twice(left, right):
    return left, left


def both(left, right):
    return left, right


def right_twice(left, right):
    return right, right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "sizes", "choices"),
    [
        (compiler, sizes, choices)
        for compiler in (flat, dynamo_eager, dynamo_symbolic)
        for sizes, choices in (
            ((10, 100, 10, 15), [left_twice] * 4),
            ((3, 3, 3, 3), [left_twice, both, right_twice, both]),
            ((3, 4, 5, 6, 7), [both, left_twice, both, right_twice, both]),
        )
    ]
    + [("inductor", (10, 100), [left_twice] * 2)],
)
def test_a_tensor_that_comes_twice_is_compiled_as_one(compiler, sizes, choices):
    torch._dynamo.reset()
    expected = list(steps(sizes, choices))
    with fresh(compiler):
        assert_same(expected, list(steps(sizes, choices)))
    stats = compiled_autograd.stats()
    assert stats.captures == 2
    assert not stats.fallbacks
    assert not stats.uncompiled_reasons
