"""Gradients of operators that take lists of tensors: with None among them, and with arguments left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fake.library import custom_op, opcheck
from tests.fake.library.support import fresh_name


def scaled() -> Any:
    """``xs`` without None, each times ``scale``, and plus ``shift``."""

    @custom_op(fresh_name(), mutates_args=())
    def op(
        xs: list[Tensor | None],
        shift: Tensor | None = None,
        dims: list[int] | None = None,
        *,
        scale: float = 2.0,
    ) -> list[Tensor]:
        return [x * scale if shift is None else x * scale + shift for x in xs if x is not None]

    @op.register_fake
    def _(xs, shift=None, dims=None, *, scale=2.0):
        return [torch.empty_like(x) for x in xs if x is not None]

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        xs, shift, _ = inputs
        ctx.present = [x is not None for x in xs]
        ctx.has_shift = shift is not None
        ctx.scale = keyword_only_inputs["scale"]

    def backward(ctx, grads):
        each = iter(grads)
        of_xs = [next(each) * ctx.scale if present else None for present in ctx.present]
        return of_xs, sum(g.sum() for g in grads).reshape(1) if ctx.has_shift else None, None

    op.register_autograd(backward, setup_context=setup_context)
    return op


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.ones(3, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.ones(1, requires_grad=True),
    )


def call_directly(op):
    return op


def call_the_overload(op):
    return op.overload


def call_compiled(op):
    options = {"compiler": "eager", "cache": "off"}
    return torch.compile(
        lambda *args, **kwargs: op(*args, **kwargs), backend="fxpasses", fullgraph=True, options=options
    )


@pytest.mark.parametrize("how", [call_directly, call_the_overload, call_compiled])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_list_with_none_has_gradients(how, place):
    x, y, _ = tensors()
    xs: list[Tensor | None] = [x, y * 2]
    xs.insert(place, None)
    outputs = how(scaled())(xs, scale=3.0)
    assert all(output.requires_grad for output in outputs)
    sum(output.sum() for output in outputs).backward()
    assert x.grad.tolist() == [3.0] * 3
    assert y.grad.tolist() == [6.0] * 2


@pytest.mark.parametrize("how", [call_directly, call_the_overload, call_compiled])
@pytest.mark.parametrize("given", [1, 2, 3])
def test_arguments_may_be_left_out(how, given):
    x, y, shift = tensors()
    outputs = how(scaled())(*([x, y], shift, [1])[:given])
    sum(output.sum() for output in outputs).backward()
    assert x.grad.tolist() == [2.0] * 3
    assert (shift.grad is None) == (given == 1)
    assert given == 1 or shift.grad.item() == 5.0


def test_lists_without_gradients():
    x, y, _ = tensors()
    op = scaled()
    with torch.no_grad():
        assert not any(output.requires_grad for output in op([x, None, y]))
    assert not op([None, x.detach()])[0].requires_grad
    assert op([None]) == []
    assert torch.autograd.grad(op([x.detach(), None, y])[1].sum(), y)[0].tolist() == [2.0, 2.0]


def test_no_formula_is_said_in_the_backward_pass():
    @custom_op(fresh_name(), mutates_args=())
    def op(xs: list[Tensor | None]) -> Tensor:
        return torch.cat([x for x in xs if x is not None])

    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        op([None, *tensors()]).sum().backward()


def test_opcheck_takes_lists_with_none():
    x, y, _ = tensors()
    assert opcheck(scaled(), ([x, None, y],), {"scale": 3.0}).ok


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_opcheck_of_a_sum_whose_terms_cancel_along_a_direction(size):
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(-1) + y.sum()

    op.register_fake(lambda x, y: x.new_empty(x.shape[:-1]))

    def setup_context(ctx, inputs, output):
        ctx.shapes = [value.shape for value in inputs]

    def backward(ctx, grad):
        return grad[..., None].expand(ctx.shapes[0]), grad.sum().expand(ctx.shapes[1])

    op.register_autograd(backward, setup_context=setup_context)
    sample = torch.randn(4, 3, requires_grad=True), torch.randn(size, requires_grad=True)
    assert opcheck(op, sample, test_utils="test_gradients").ok
