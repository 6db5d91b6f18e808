"""Python numbers in the forward: a compiled backward pass must follow when they change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import compiled_autograd
from tests.compiled_autograd.support import flat, keep

Function = Callable[[torch.Tensor, Any], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "mul": lambda x, s: x * s,
    "div": lambda x, s: x / s,
    "divided": lambda x, s: s / x,
    "pow": lambda x, s: x.abs() ** s,
    "powered": lambda x, s: abs(s) ** x,
    "add alpha": lambda x, s: torch.add(x.sin(), x, alpha=s),
    "sub alpha": lambda x, s: torch.sub(x.sin(), x, alpha=s),
    "clamp": lambda x, s: x.clamp(min=-abs(s), max=abs(s) / 2),
    "leaky relu": lambda x, s: F.leaky_relu(x, s),
    "elu": lambda x, s: F.elu(x, s),
    "softplus": lambda x, s: F.softplus(x, s, 3.0),
    "threshold": lambda x, s: F.threshold(x, s, 0.5),
    "where": lambda x, s: torch.where(x > 0, x * x, s),
    "masked fill": lambda x, s: (x * x).masked_fill(x > s, s),
    "lerp": lambda x, s: torch.lerp(x, x.sin(), s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x.cos(), value=s),
    "remainder": lambda x, s: x * (x % s),
    "norm": lambda x, s: x.norm(p=abs(s) + 1),
    "in place": lambda x, s: x.sin().mul_(s).add_(x),
    "scalar chain": lambda x, s: x.sum() * s,
    "two": lambda x, s: (x * s).cos() * (s + 1),
    "size": lambda x, s: x.sum(0) * (s / x.shape[0]),
}


def _gradients(function: Function, numbers: list[Any], sizes: list[int]) -> list[torch.Tensor]:
    found = []
    for number, size in zip(numbers, sizes, strict=True):
        torch.manual_seed(0)
        x = torch.randn(size, 3, requires_grad=True)
        function(x, number).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


CASES = [
    *itertools.product(FUNCTIONS, [keep, flat]),
    *itertools.product(["mul", "size"], ["eager", "aot_eager"]),
]


@pytest.mark.parametrize(("name", "compiler"), CASES)
def test_changing_numbers(name: str, compiler: Any) -> None:
    compiled_autograd.reset()
    torch._dynamo.reset()
    numbers = [2.0, 2.0, 3.5, -1.5, 0.25, 2, 2.0]
    for sizes in ([4] * len(numbers), [4, 6, 4, 6, 5, 5, 7]):
        expected = _gradients(FUNCTIONS[name], numbers, sizes)
        with compiled_autograd.enable(compiler):
            found = _gradients(FUNCTIONS[name], numbers, sizes)
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("numbers", [[0.0, -0.0, 0.0], [math.nan, 1.0, math.nan], [1.0, math.inf, -math.inf]])
def test_special_numbers(numbers: list[float]) -> None:
    def function(x: torch.Tensor, number: float) -> torch.Tensor:
        return 1 / (x.detach() * 0 + x * number)

    expected = _gradients(function, numbers, [2] * len(numbers))
    with compiled_autograd.enable("eager"):
        found = _gradients(function, numbers, [2] * len(numbers))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_numbers_that_change_cost_one_more_compilation() -> None:
    compiled_autograd.reset()
    with compiled_autograd.enable("aot_eager"):
        for number in (1.0, 1.0, 2.0, 3.0, 4.0, 1.0):
            x = torch.ones(3, requires_grad=True)
            (x * number).sin().sum().backward()
    stats = compiled_autograd.stats()
    assert stats.compiles == 2
    assert not stats.uncompiled_reasons
