import pytest
import torch

from fxpasses.passes import ReassociateMatmuls
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = ReassociateMatmuls()
X = torch.linspace(-1, 1, 20 * 16).reshape(20, 16)
DOWN = torch.linspace(-1, 1, 32).reshape(16, 2).requires_grad_()
UP = torch.linspace(-1, 2, 32).reshape(2, 16).requires_grad_()


def low_rank(x, down, up):
    return x @ (down @ up)


def linear_attention(q, k, v):
    return (q @ k.transpose(-1, -2)) @ v


def test_golden():
    assert_golden(PASS, low_rank, X, DOWN, UP)


def test_results_and_gradients():
    assert_trains(
        PASS, Wrapped(low_rank, DOWN, UP), X.clone().requires_grad_(), dtypes=(torch.float32, torch.bfloat16)
    )
    assert_trains(
        PASS,
        Wrapped(lambda x, d, u: (x @ (d @ u)) @ (d @ u).t(), DOWN, UP),
        X,
        dtypes=(torch.float32, torch.bfloat16),
    )
    q, k, v = (torch.randn(2, 3, 16, 4, requires_grad=True) for _ in range(3))
    assert_trains(PASS, Wrapped(linear_attention), q, k, v)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, d, u: (x @ d) @ u,  # in the best order already
        lambda x, d, u: x @ (d @ u).relu(),
        lambda x, d, u: x @ (d @ u) + (d @ u).sum(),
        lambda x, d, u: (d @ u) @ (d @ u),  # not linear in it
        lambda x, d, u: (x @ (d @ u), d @ u),  # returned
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, DOWN.detach(), UP.detach())


def test_gain_is_an_option():
    assert_left_alone(ReassociateMatmuls(gain=100.0), low_rank, X, DOWN.detach(), UP.detach())
