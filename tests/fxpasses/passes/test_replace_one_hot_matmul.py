import pytest
import torch
from torch.nn import functional as F

from fxpasses.passes import ReplaceOneHotMatmul
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = ReplaceOneHotMatmul()
WEIGHT = torch.linspace(-1, 1, 21).reshape(7, 3).requires_grad_()
INDEX = torch.tensor([[3, 0, 6], [6, 6, 1]])


def equality(index, weight):
    """One-hot rows by comparison: an index out of range gives zeros."""
    return (index[..., None] == torch.arange(7)).to(weight.dtype) @ weight


def test_golden():
    assert_golden(PASS, equality, INDEX, WEIGHT)


def test_results_and_gradients():
    assert_trains(PASS, Wrapped(equality, WEIGHT), INDEX)
    assert_trains(PASS, Wrapped(equality, WEIGHT), torch.tensor([3, -1, 7, 100, 0]))
    assert_trains(PASS, Wrapped(equality, WEIGHT), INDEX.int())
    assert_trains(PASS, Wrapped(lambda i, w: F.one_hot(i, 7).to(w.dtype) @ w, WEIGHT), INDEX)
    model = torch.nn.Linear(7, 2)
    assert_trains(
        PASS, Wrapped(lambda i, w, b: F.linear(F.one_hot(i, 7).to(w.dtype), w, b), *model.parameters()), INDEX
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda i, w: (i[..., None] == torch.arange(1, 8)).to(w.dtype) @ w,  # other classes
        lambda i, w: (i[..., None] == torch.arange(7) * 2).to(w.dtype) @ w,
        lambda i, w: (i[..., None] >= torch.arange(7)).to(w.dtype) @ w,
        lambda i, w: (
            (i[..., None].to(w.dtype) == torch.arange(7).to(w.dtype)).to(w.dtype) @ w
        ),  # not integers
        lambda i, w: ((i[..., None] == torch.arange(7)).to(w.dtype) * 2) @ w,
        lambda i, w: (i[0][:, None] == i[1][None, :]).to(w.dtype) @ w[:3],
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, INDEX, WEIGHT)


def test_columns_that_change_in_number():
    weight = torch.randn(7, 4).requires_grad_()
    torch._dynamo.reset()
    torch._dynamo.maybe_mark_dynamic(weight, 1)
    index = torch.tensor([3, 0, 6, 3])
    options = {"passes": ["default", PASS, "default"], "compiler": "eager"}
    compiled = torch.compile(
        lambda i, w: F.one_hot(i, 7).to(w.dtype) @ w, backend="fxpasses", options=options
    )
    compiled(index, weight).sum().backward()
    assert torch.equal(weight.grad, torch.bincount(index, minlength=7)[:, None].expand(7, 4).float())
