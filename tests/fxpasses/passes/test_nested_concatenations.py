import pytest
import torch

from fxpasses.passes import NestedConcatenations
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = NestedConcatenations()
A, B, C = (torch.linspace(-1, 1, 4 * n).reshape(4, n).requires_grad_() for n in (3, 2, 1))


def growing(a, b, c):
    first = torch.cat([a.sin(), b], 1)
    second = torch.cat([first, c], 1)
    return second[:, :3] * 2, second.exp()


def test_golden():
    assert_golden(PASS, growing, A, B, C)


@pytest.mark.parametrize(
    "function",
    [
        growing,
        lambda a, b, c: torch.cat([c, torch.cat([a, b], 1), torch.cat([b, c], 1)], 1).sin(),
        lambda a, b, c: torch.cat([a, a * 2], 0)[4:6].exp() * b.sum() * c.sum(),
        lambda a, b, c: torch.cat([a, b], 1)[:, 3:5].exp() * torch.cat([a, b], 1)[:, 1:2].sin(),
        lambda a, b, c: torch.cat([a, b], 1)[:, 1:][:, 2:4].exp(),
    ],
)
def test_results_and_gradients(function):
    assert_trains(PASS, Wrapped(function), A, B, C)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: torch.cat([a, b], 1)[:, 2:4].exp(),  # across two parts
        lambda a, b, c: torch.cat([torch.cat([a, b], 1), a.repeat(1, 2)[:, :5]], 0) * 2,  # another dimension
        lambda a, b, c: (torch.cat([torch.cat([a, b], 1), c], 1), torch.cat([a, b], 1)),  # needed anyway
        lambda a, b, c: torch.cat([a, b], 1)[:, :3],  # returned: a view of the one, not of the other
        lambda a, b, c: torch.cat([a.double(), b], 1)[:, 3:].exp(),  # the part has another type
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, A.detach(), B.detach(), C.detach())
