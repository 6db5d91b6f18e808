"""Hooks that are registered inside of functions that compile to one graph: they run in the captured backward pass."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import assert_same, flat, fresh, grads, keep, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Hooked(torch.nn.Module):
    """Hooks of modules, and one of a tensor between them that changes a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = mlp()
        self.seen: list[tuple[int, ...]] = []
        self.model[0].register_full_backward_hook(lambda _, inner, outer: (inner[0] + outer[0],))
        self.model[2].register_full_backward_pre_hook(lambda _, outer: (outer[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.model(x)
        middle.register_hook(self.see)
        return self.model(middle * 2)

    def see(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(grad.shape))
        return grad * 3


def trained(
    compiled: Callable[[Any], Any], around: Callable[[], Any] = contextlib.nullcontext, **options: Any
) -> list[Any]:
    model = Hooked()
    function, results = compiled(model), []
    for size in (2, 2, 5):
        x = torch.linspace(-1, 1, size * 4).view(size, 4).requires_grad_()
        loss = function(x).square().sum()
        with around():
            loss.backward(**options)
        results.append((x.grad, grads(model), list(model.seen)))
    return results


def whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("compiler", [keep, flat])
def test_hooks_of_one_graph_run_in_the_captured_pass(compiler: Any) -> None:
    expected = trained(lambda model: model)
    with fresh(compiler):
        assert_same(expected, trained(whole))
    stats = compiled_autograd.stats()
    assert stats.captures
    assert not stats.fallbacks
    assert not stats.called_reasons
    assert not stats.uncompiled_reasons


def test_where_backward_graphs_are_called_the_hooks_run_too() -> None:
    """Autocast around the backward pass alone has no say in a graph that was traced without."""
    expected = trained(lambda model: model)
    with fresh(keep):
        assert_same(expected, trained(whole, around=lambda: torch.autocast("cpu", torch.bfloat16)))
    assert not compiled_autograd.stats().fallbacks


def test_a_result_that_would_have_no_history_is_refused() -> None:
    with (
        fresh(keep),
        pytest.raises(RuntimeError, match="without create_graph, or register the hooks outside"),
    ):
        trained(whole, create_graph=True)


def test_without_fullgraph_backward_passes_run_anywhere() -> None:
    expected = trained(lambda model: model)

    def in_parts(model: Any) -> Any:
        function = torch.compile(model, backend="aot_eager")

        def call(x: torch.Tensor) -> torch.Tensor:
            with fresh(keep):
                return function(x)

        return call

    assert_same(expected, trained(in_parts))


def test_an_operator_may_take_its_last_use_of_a_value_by_keyword() -> None:
    """An operator that changes its argument is called with keywords once it is functional."""
    with torch.library._scoped_library("traced_hooks", "FRAGMENT") as library:
        library.define("grow(Tensor(a!) x) -> ()")
        library.impl("grow", lambda x: setattr(x, "data", x + 5), "CPU")
        library.impl("grow", lambda x: None, "Meta")

        class Grow(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                grad = grad * 3
                torch.ops.traced_hooks.grow(grad)
                return grad.sin()

        def run(function: Callable[..., Any]) -> torch.Tensor | None:
            x = torch.ones(3, requires_grad=True)
            function(x).sum().backward()
            return x.grad

        expected = run(Grow.apply)
        function = torch.compile(lambda x: Grow.apply(x), backend="aot_eager", fullgraph=True)
        report = compiled_autograd.explain(lambda: assert_same(expected, run(function)))
        assert any(node.kwargs for node in report.graphs[0].graph.nodes)
