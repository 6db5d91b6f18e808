"""A partitioned forward and backward pass computes what eager computes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.fxpasses.partitioner import models
from tests.fxpasses.partitioner.functions import FUNCTIONS
from tests.fxpasses.partitioner.support import compile_split

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": lambda: (models.GPT(layers=1), (torch.randint(0, 256, (2, 16)),)),
    "gpt with dropout": lambda: (models.GPT(layers=1, dropout=0.1), (torch.randint(0, 256, (2, 16)),)),
    "convnet": lambda: (models.ConvNet(), (torch.randn(2, 3, 16, 16),)),
    "encoder decoder": lambda: (models.EncoderDecoder(), (torch.randn(2, 5, 8), torch.randn(2, 6, 8))),
    "mixture of experts": lambda: (models.MixtureOfExperts(), (torch.randn(6, 16),)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "dynamic"), [(1.0, False), (0.5, True), (0.0, False)])
@pytest.mark.parametrize("name", MODELS)
def test_module_trains_like_eager(name: str, dynamic: bool, budget: float) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().train()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    mirror = copy.deepcopy(model)
    compiled, splits = compile_split(mirror, memory_budget=budget, dynamic=dynamic)

    torch.manual_seed(1)
    expected = model(*inputs)
    expected.sum().backward()
    torch.manual_seed(1)
    actual = compiled(*inputs)
    actual.sum().backward()

    assert splits[0].report.memory_budget == budget
    torch.testing.assert_close(actual, expected)
    for (key, ours), theirs in zip(mirror.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")
    for (key, ours), theirs in zip(mirror.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_the_gradients_of_eager(name: str, budget: float) -> None:
    torch.manual_seed(0)
    function, inputs = FUNCTIONS[name]()
    expected, expected_inputs = run_twice(function, inputs)
    compiled, _ = compile_split(copy.deepcopy(function), memory_budget=budget)
    actual, actual_inputs = run_twice(compiled, inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_inputs, expected_inputs)


def run_twice(function: Callable[..., Any], inputs: list[Any]) -> tuple[Any, list[Any]]:
    """Outputs of two calls, and what became of the inputs, their gradients included."""
    mine = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    torch.manual_seed(3)
    outputs = []
    for _ in range(2):
        result = function(*mine)
        leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        sum(t.abs().sum() for t in leaves if t.requires_grad).backward()
        outputs.append([t.detach().clone() for t in leaves])
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    return outputs, [(t.detach(), t.grad) for t in (*mine, *parameters)]
