"""Validation of gradients between nodes: what fits passes, what was broadcast is reduced, the rest is as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_autograd
from compiled_autograd.runtime import validation


def _bind() -> None:
    """C++ binds its own validation when it first captures a pass in a process."""
    x = torch.ones(2, requires_grad=True)
    with compiled_autograd.enable(lambda graph: graph):
        (x * 2).sum().backward()


def test_a_gradient_that_fits_is_passed_on() -> None:
    grad = torch.randn(2, 3)
    assert validation.validate(grad, "F", 0, torch.float32, "cpu", (2, 3)) is grad
    assert validation.validate(None, "F", 0, torch.float32, "cpu", (2, 3)) is None


@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 4), (3, 1), (1, 1), ()])
def test_a_gradient_of_a_broadcast_input_is_reduced(shape: tuple[int, ...]) -> None:
    _bind()
    grad = torch.randn(2, 3, 4)
    expected = torch.empty(shape, requires_grad=True)
    (expected.expand(2, 3, 4) * grad).sum().backward()
    found = validation.validate(grad, "F", 1, torch.float32, "cpu", shape)
    assert found is not None
    torch.testing.assert_close(found, expected.grad)


def test_a_gradient_of_another_dtype_is_cast() -> None:
    _bind()
    found = validation.validate(torch.ones(3, dtype=torch.float64), "F", 0, torch.float32, "cpu", (3,))
    assert found is not None
    assert found.dtype is torch.float32


class WrongShape(torch.autograd.Function):
    """Its second gradient has a shape that no broadcasting explains."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, grad.new_ones(7)


def test_a_gradient_that_cannot_fit_is_refused_with_eagers_text() -> None:
    def run() -> str:
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        with pytest.raises(RuntimeError) as caught:
            WrongShape.apply(x, y).sum().backward()
        return str(caught.value)

    eager = run()
    with compiled_autograd.enable(lambda graph: graph):
        captured = run()
    assert captured == eager
    assert "index 1" in eager


def test_broadcasting_inputs_of_a_captured_pass() -> None:
    def gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        leaves = [
            torch.randn(shape, requires_grad=True) for shape in [(4,), (3, 1), (1, 3, 4), (), (2, 3, 4)]
        ]
        total = leaves[0] * leaves[1] + leaves[2] / (2 + leaves[3].exp()) - leaves[4]
        total.sin().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients()
    with compiled_autograd.enable(lambda graph: graph):
        found = [gradients(), gradients()]
    for grads in found:
        torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_metadata_that_is_not_plain_is_left_to_cpp() -> None:
    device = torch.device("cpu")
    plain = ((None, None, device, 6, 0, None), [2, 3], False, 6)
    assert validation.plain_metadata(plain) == (torch.float32, "cpu", (2, 3))
    assert validation.plain_metadata(((None, None, device, 6, 1, None), [2, 3], False, 6)) is None
    assert validation.plain_metadata(((None, None, device, 6, 0, None), [2, 3], True, 6)) is None
    assert validation.plain_metadata(((True, None, device, 6, 0, None), [2, 3], False, 6)) is None
    assert validation.plain_metadata(None) is None
