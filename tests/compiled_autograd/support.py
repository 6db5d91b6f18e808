"""Run a function in eager and under capture, and compare everything it returns or yields."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import compiled_autograd
from compiled_autograd import Stats


def keep(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A compiler that runs graphs as they are."""
    return graph


def flat(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend that runs lowered segments as they are."""
    return graph.forward


def dynamo_eager(graph: torch.fx.GraphModule) -> Any:
    """What a user would write who wants Dynamo and no more."""
    return torch.compile(graph, backend="eager", fullgraph=True)


COMPILERS = [
    pytest.param(keep, id="keep"),
    pytest.param(flat, id="flat"),
    pytest.param(dynamo_eager, id="dynamo"),
]


def assert_same(expected: Any, actual: Any, where: str = "result") -> None:
    """Equal structure, kind of tensor, and values."""
    assert type(expected) is type(actual), f"{where}: {type(expected)} and {type(actual)}"
    if isinstance(expected, torch.Tensor):
        assert expected.layout == actual.layout, where
        assert expected.requires_grad == actual.requires_grad, where
        torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual), f"{where}: {expected} and {actual}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_same(expected[key], actual[key], f"{where}[{key!r}]")
    else:
        assert expected == actual, where


def check(
    function: Callable[[], Any],
    compiler: Any = keep,
    *,
    dynamic: bool = True,
    captures: int | None = None,
    fallbacks: int | None = 0,
) -> Stats:
    """Run ``function`` in eager and under capture from a fresh cache; everything it returns must be the same.

    A generator's values are collected. At least one capture must be made, unless ``captures`` says how many; ``fallbacks`` None
    allows any number of them.
    """
    expected = _results(function)
    compiled_autograd.reset()
    with compiled_autograd.enable(compiler, dynamic=dynamic):
        actual = _results(function)
    stats = compiled_autograd.stats()
    assert_same(expected, actual)
    assert fallbacks is None or stats.fallbacks == fallbacks, stats.fallback_reasons
    if captures is None:
        assert stats.captures > 0 or fallbacks is None
    else:
        assert stats.captures == captures
    return stats


def _results(function: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    result = function()
    return list(result) if hasattr(result, "__next__") else result


@contextlib.contextmanager
def fresh(compiler: Any = keep, **options: Any) -> Iterator[None]:
    """Capturing enabled, with empty cache and counts."""
    compiled_autograd.reset()
    with compiled_autograd.enable(compiler, **options):
        yield


def mlp() -> torch.nn.Sequential:
    """Two linear layers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Tanh())


def grads(model: torch.nn.Module) -> list:
    """Copies of the gradients of a model."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
