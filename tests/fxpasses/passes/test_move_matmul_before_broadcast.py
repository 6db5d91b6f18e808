import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpasses.passes import MoveMatmulBeforeBroadcast
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = MoveMatmulBeforeBroadcast()
X = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
Y = torch.linspace(-2, 1, 30).reshape(6, 5).requires_grad_()
WEIGHT = torch.linspace(-1, 1, 8 * 3).reshape(8, 3).requires_grad_()
DTYPES = (torch.float32, torch.bfloat16)


def pairs(x, weight):
    left, right = x[:, None].expand(6, 6, 4), x[None].expand(6, 6, 4)
    return torch.cat([left, right], -1) @ weight


def test_golden():
    assert_golden(PASS, pairs, X, WEIGHT)


@pytest.mark.parametrize("dtypes", [(torch.float64,), DTYPES])
@pytest.mark.parametrize(
    "model",
    [
        Wrapped(pairs, WEIGHT),
        Wrapped(lambda x, w: pairs(x, w.t().contiguous().t()).relu(), WEIGHT),
        Wrapped(lambda x, w, b: F.linear(torch.cat([x[:, None].expand(6, 5, 4), x[:, None].sin().expand(6, 5, 4)], -1), w, b),
                nn.Parameter(torch.linspace(-1, 1, 24).reshape(3, 8)), nn.Parameter(torch.ones(3))),
        # One part has rows of its own, the other is the same for all rows of a group.
        Wrapped(lambda x, w: torch.cat([x.view(2, 3, 4), x.view(2, 3, 4)[:, :1].expand(2, 3, 4)], -1) @ w, WEIGHT),
        Wrapped(lambda x, w: x[None].expand(7, 6, 4).contiguous() @ w[:4], WEIGHT),
    ],
)  # fmt: skip
def test_results_and_gradients(model, dtypes):
    assert_trains(PASS, model, X, dtypes=dtypes)


def test_rows_that_are_summed_after_a_product():
    def f(x, w):
        return (x @ w[:4]).view(2, 3, 3).sum(1)

    assert_trains(PASS, Wrapped(f, WEIGHT), X, dtypes=DTYPES)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, w: torch.cat([x, y[:, :4]], -1) @ w,  # nothing is broadcast
        lambda x, y, w: torch.cat([x[:, None].expand(6, 6, 4), x[None].expand(6, 6, 4)], -1).relu() @ w,
        lambda x, y, w: (
            x[:, None].expand(6, 6, 4).transpose(1, 2).reshape(24, 6) @ y
        ),  # columns are broadcast
        lambda x, y, w: torch.cat([x, x[:1].expand(6, 4)], 0) @ w[:4],  # concatenated by rows
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X.detach(), Y.detach(), WEIGHT.detach())


def test_gain_is_an_option():
    assert_left_alone(MoveMatmulBeforeBroadcast(gain=1000.0), pairs, X.detach(), WEIGHT.detach())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, w: a[:, None].expand(-1, 4, -1) @ w,
        lambda a, w: (a @ w).view(-1, 1, 6).expand(-1, 4, -1).sum(1),
        lambda a, w: (lambda p: p.t() @ p @ w)(a[:, None].expand(-1, 4, -1).reshape(-1, 3)),
    ],
)
@pytest.mark.parametrize("dynamic", [None, (0, 1), (1, 1)])
def test_one_row_and_both_sides_and_sizes_that_change(count, function, dynamic):
    torch._dynamo.reset()
    inputs, again = (
        [torch.ones(count, 3).requires_grad_(), torch.ones(3, 6).requires_grad_()] for _ in range(2)
    )
    if dynamic is not None:
        torch._dynamo.maybe_mark_dynamic(inputs[dynamic[0]], dynamic[1])
    options = {"passes": ["default", MoveMatmulBeforeBroadcast(gain=1.0), "default"], "compiler": "eager"}
    torch.compile(lambda a, w: function(a, w), backend="fxpasses", options=options)(*inputs).sum().backward()
    function(*again).sum().backward()
    for ours, theirs in zip(inputs, again, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
