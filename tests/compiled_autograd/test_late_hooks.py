"""Hooks that are added while a captured pass runs are called, too late for it as in eager, or refused: never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_autograd


def keep(graph: torch.fx.GraphModule) -> Any:
    return graph


@pytest.mark.parametrize("compiler", [keep, "eager"])
def test_a_hook_for_a_node_to_come_is_refused(compiler: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    z.register_hook(lambda gradient: y.register_hook(lambda inner: 2 * inner) and None)
    with compiled_autograd.enable(compiler), pytest.raises(compiled_autograd.LateHookError) as caught:
        z.sum().backward()
    assert (caught.value.node, caught.value.running) == ("ExpBackward0", "SinBackward0")
    assert y._backward_hooks is None
    assert x.grad is None


def test_a_post_accumulate_hook_to_come_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: x.register_post_accumulate_grad_hook(print) and None)
    with (
        compiled_autograd.enable(keep),
        pytest.raises(compiled_autograd.LateHookError, match="AccumulateGrad"),
    ):
        y.sum().backward()


def test_hooks_whose_turn_is_over_or_that_belong_elsewhere_are_added() -> None:
    calls: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    other = torch.ones(3, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        if not calls:
            z.register_hook(lambda inner: calls.append("over"))
            y.register_hook(lambda inner: calls.append("same node"))
            other.register_hook(lambda inner: calls.append("elsewhere"))
        calls.append("first")

    y.register_hook(hook)
    with compiled_autograd.enable(keep):
        z.sum().backward(retain_graph=True)
        assert calls == ["first"]
        (z.sum() + other.sum()).backward()
    assert sorted(calls) == ["elsewhere", "first", "first", "over", "same node"]


def test_outside_of_a_captured_pass_nothing_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    with compiled_autograd.enable(keep):
        z.register_hook(lambda gradient: None)
        with compiled_autograd.disable():
            y.register_hook(lambda gradient: None)
            z.register_hook(lambda gradient: x.register_hook(lambda inner: 2 * inner) and None)
            z.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(torch.ones(3).exp()) * torch.ones(3).exp())
