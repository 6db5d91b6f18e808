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


def _late_node_hook(register: str, compiler: Any) -> tuple[Any, Any]:
    """A hook of ``sin`` adds a hook to the node of ``exp``, whose turn comes later."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    node = y.grad_fn
    z.register_hook(lambda gradient: getattr(node, register)(lambda *gradients: None) and None)
    with compiled_autograd.enable(compiler), pytest.raises(compiled_autograd.LateHookError) as caught:
        z.sum().backward()
    return x, caught.value


@pytest.mark.parametrize("compiler", [keep, "eager"])
@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_on_a_node_to_come_is_refused_and_taken_away(register: str, compiler: Any) -> None:
    x, error = _late_node_hook(register, compiler)
    assert (error.node, error.running) == ("ExpBackward0", "SinBackward0")
    assert x.grad is None


def test_a_hook_that_joins_others_of_its_node_is_refused_and_taken_away() -> None:
    calls: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    node: Any = y.grad_fn
    node.register_hook(lambda *gradients: calls.append("early") and None)
    z = y.sin()
    late = z.register_hook(
        lambda gradient: node.register_hook(lambda *inner: calls.append("late") and None) and None
    )
    with compiled_autograd.enable(keep), pytest.raises(compiled_autograd.LateHookError):
        z.sum().backward(retain_graph=True)
    late.remove()
    calls.clear()
    z.sum().backward()
    assert calls == ["early"]


def test_a_hook_on_a_node_from_its_own_unpacking_is_refused() -> None:
    holder: list[Any] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        holder[0].register_hook(lambda inputs, outputs: tuple(2 * gradient for gradient in inputs))
        return tensor

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = x.sin()
    holder.append(y.grad_fn)
    with compiled_autograd.enable(keep), pytest.raises(compiled_autograd.LateHookError, match="SinBackward0"):
        y.sum().backward()


@pytest.mark.parametrize("context", [lambda: compiled_autograd.enable(keep), compiled_autograd.disable])
def test_hooks_on_nodes_that_are_over_or_belong_elsewhere_are_added(context: Any) -> None:
    calls: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    over, own = z.grad_fn, y.grad_fn
    assert over is not None
    assert own is not None

    def post(*gradients: Any) -> None:
        calls.append("post")
        if len(calls) == 1:
            over.register_hook(lambda *_: calls.append("over") and None)
            own.register_hook(lambda *_: calls.append("own") and None)
            other = torch.ones(2, requires_grad=True)
            with torch.enable_grad():
                elsewhere = other.exp()
                total = elsewhere.sum()
            assert elsewhere.grad_fn is not None
            elsewhere.grad_fn.register_hook(lambda *_: calls.append("elsewhere") and None)
            total.backward()

    own.register_hook(post)
    with context():
        z.sum().backward(retain_graph=True)
        assert calls == ["post", "elsewhere"]
        z.sum().backward()
    assert sorted(calls[2:]) == ["over", "own", "post"]


def test_all_hooks_that_come_too_late_are_taken_away() -> None:
    calls: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    node: Any = y.grad_fn
    z = y.sin()

    def add(gradient: torch.Tensor) -> None:
        node.register_hook(lambda *_: calls.append("post") and None)
        node.register_prehook(lambda *_: calls.append("pre") and None)

    adding = z.register_hook(add)
    with compiled_autograd.enable(keep), pytest.raises(compiled_autograd.LateHookError):
        z.sum().backward(retain_graph=True)
    adding.remove()
    z.sum().backward()
    assert calls == []
