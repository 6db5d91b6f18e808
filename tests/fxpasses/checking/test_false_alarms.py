"""The value check raises no alarm on right passes, over models of many kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import fxpasses
from fxpasses.demo.gpt import GPT
from tests.fxpasses.checking import plants
from tests.models.zoo import ZOO

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def train(model, inputs, passes, **how):
    """One step; passes that change nothing would ask nothing of the check."""
    fxpasses.reset_stats()
    options = {"compiler": "eager", "check": "values", "passes": passes}
    outputs = torch.compile(model, backend="fxpasses", options=options, **how)(*inputs)
    losses = [
        v.float().sum() for v in tree_leaves(outputs) if isinstance(v, torch.Tensor) and v.requires_grad
    ]
    sum(losses).backward()
    assert fxpasses.stats().pass_changes, "no pass has changed anything"
    assert all(
        name in fxpasses.stats().pass_changes for name in (getattr(p, "name", None) for p in passes) if name
    )


def build(name):
    # One layer of the GPT has every sort of site that two have, at less than half of the time.
    return GPT(1, 16, 2, 32, 40) if name == "gpt" else ZOO[name].build()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_default_passes(name):
    train(build(name), ZOO[name].inputs(2), ["default"])


SPLITS, BOTH = [plants.splits_products], [plants.reorders_a_product, plants.splits_products]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "passes"),
    [
        ("relative", torch.float32, BOTH),
        ("relative", torch.bfloat16, BOTH),
        ("many_outputs", torch.float32, SPLITS),
        ("many_outputs", torch.bfloat16, SPLITS),
        ("gpt", torch.bfloat16, SPLITS),
    ],
)
def test_passes_that_round_in_another_way(name, dtype, passes):
    entry = ZOO[name]
    inputs = [
        v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in entry.inputs(3)
    ]
    inputs = [
        v.detach().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for v in inputs
    ]
    train(build(name).to(dtype), inputs, passes)


class FeedForward(nn.Module):
    """One of each sort of site for ``BOTH`` that a GPT has outside of its attention, which ``relative`` has."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, targets):
        return F.cross_entropy(x + self.down(F.gelu(self.up(self.norm(x)))), targets)


@pytest.mark.slow
def test_products_in_a_layer_norm_and_a_cross_entropy_that_round_in_another_way():
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    train(FeedForward().to(torch.bfloat16), [x, torch.randint(0, 16, (6,))], BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_symbolic_sizes(name):
    train(build(name), ZOO[name].inputs(3), ["default"], dynamic=True)


def test_dropout():
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Dropout(0.1)
    )
    train(model, [torch.randn(5, 6)], ["default"])


def test_memory_that_nobody_reads_may_stay_uninitialised():
    def f(x):
        unused = x.new_empty(3)
        full = torch.empty(3)
        full.copy_(x)
        return full.sin() * x * x, unused.shape[0]

    train(f, [torch.randn(3, requires_grad=True)], ["default", plants.reorders_a_product])


def test_no_guard_is_added_by_trying_other_sizes():
    fxpasses.reset_stats()
    options = {"compiler": "eager", "check": "values", "passes": [plants.reorders_a_product]}

    @torch.compile(backend="fxpasses", dynamic=True, options=options)
    def f(x):
        return x * 2 * x.sum(0) / x.cos() / x.shape[0]

    for size in (4, 9, 16, 33):
        f(torch.randn(size, 3))
    assert fxpasses.stats().graphs == 1
    assert "reorders_a_product" in fxpasses.stats().pass_changes
