"""A result of a collective that nobody has waited for yet (``AsyncCollectiveTensor``) as the input of a compiled function."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summed(torch.autograd.Function):
    """What the output of a sequence-parallel embedding is: pending, with a gradient."""

    @staticmethod
    def forward(ctx, value):
        return all_reduce(value, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _gradient(function, *, change=False):
    weight = torch.linspace(0.1, 1, 6, requires_grad=True)
    pending = Summed.apply(weight * 2)
    assert isinstance(pending, AsyncCollectiveTensor)
    function(pending, change).sum().backward()
    return weight.grad


def layer(x, change):
    if change:
        x.mul_(3)
    return x.sin() * x


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_go_through(compiler, dynamic):
    compiled = torch.compile(layer, backend="fxpasses", dynamic=dynamic, options={"compiler": compiler})
    torch.testing.assert_close(_gradient(compiled), _gradient(layer))


def test_gradients_go_through_a_changed_one():
    compiled = torch.compile(layer, backend="fxpasses", options={"compiler": "eager"})
    torch.testing.assert_close(_gradient(compiled, change=True), _gradient(layer, change=True))
