"""Steps that compile to one graph, backward pass and all: Dynamo traces the pass, and leaves nothing to capture."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import assert_same, grads, mlp

Step = Callable[[torch.nn.Module, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _trace_autograd():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def accumulation_and_update(model: torch.nn.Module, x: torch.Tensor) -> Any:
    for part in (x, x * 2):
        (model(part).square().mean() / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    return norm


def gradient_penalty(model: torch.nn.Module, x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).exp().sum(), x, create_graph=True)
    loss = (grad.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss.detach()


def hook_between(model: torch.nn.Module, x: torch.Tensor) -> Any:
    middle = model(x)
    middle.register_hook(lambda grad: grad * 2)
    model(middle).sum().backward()
    return middle.detach()


def ran(step: Step, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = mlp()
    if options:
        step = torch.compile(step, fullgraph=True, **options)
    batches = [torch.linspace(-1, 1, size * 4).view(size, 4) for size in (2, 2, 3)]
    return [
        (step(model, batch), grads(model), [p.detach().clone() for p in model.parameters()])
        for batch in batches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("step", [accumulation_and_update, gradient_penalty, hook_between])
@pytest.mark.parametrize("how", ["enable", "option"])
def test_a_step_is_one_graph_where_dynamo_traces_it(how: str, step: Step) -> None:
    expected = ran(step)
    if how == "option":
        around: Any = contextlib.nullcontext()
        options = {"backend": "fxpasses", "options": {"compiled_autograd": True, "compiler": "eager"}}
    else:
        around, options = compiled_autograd.enable("aot_eager"), {"backend": "aot_eager"}
    with around:
        assert_same(expected, ran(step, **options))
    assert compiled_autograd.stats().captures == 0
