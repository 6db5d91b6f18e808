import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import ConcatMatmuls
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)

PASS = ConcatMatmuls()
EXACT = (torch.float64, torch.float32)
X = torch.randn(3, 2, 4)
WEIGHT = torch.linspace(-1, 1, 40).reshape(4, 10)


def matmuls(gm):
    return [
        n for n in gm.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]


class Recurrent(nn.Module):
    """Two cells of different kinds and a head, step by step."""

    def __init__(self, dropout=0.0, stacked=True):
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.Linear(6, 7)
        self.dropout, self.stacked = dropout, stacked

    def forward(self, x):
        h = c = g = x.new_zeros(x.shape[1], 6)
        logits = []
        for step in x:
            h, c = self.first(F.dropout(step, self.dropout), (h, c))
            g = self.second(F.dropout(h, self.dropout), g)
            logits.append(self.head(g))
        return torch.stack(logits) if self.stacked else tuple(logits)


def steps(x, weight):
    return torch.stack([(x[0] @ weight).tanh(), (x[1] @ weight).sin(), (x[2] @ weight).exp()])


def test_golden():
    assert_golden(PASS, steps, X, WEIGHT.clone().requires_grad_())


@pytest.mark.slow
def test_results_and_gradients():
    assert_trains(PASS, Wrapped(steps, WEIGHT), X, dtypes=(*EXACT, torch.bfloat16))
    assert_trains(PASS, Recurrent(), X, dtypes=EXACT)
    assert_trains(PASS, Recurrent(), X, dtypes=EXACT, backward=False)


def test_returned_products_have_memory_of_their_own():
    assert_trains(PASS, Recurrent(stacked=False), X, dtypes=EXACT)
    options = {"passes": ["default", PASS], "compiler": "eager"}
    compiled = torch.compile(lambda x, w: (x[0] @ w, (x[1] @ w)[0]), backend=backend, options=options)
    first, second = compiled(X, WEIGHT)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    torch.testing.assert_close(first, X[0] @ WEIGHT)
    torch.testing.assert_close(second, (X[1] @ WEIGHT)[0])


def test_what_does_not_depend_on_the_loop_is_one_product_each():
    gm = captured(Recurrent(), X)
    before = len(matmuls(gm))
    assert rewrite(PASS, gm)
    # Forward: inputs of both cells and the head; backward: gradients of the head's and of the second cell's input.
    assert before - len(matmuls(gm)) == 5 * 2


@pytest.mark.slow
def test_random_draws_keep_their_order():
    gm = captured(Recurrent(dropout=0.5), X)
    drawn = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.rand.default]
    assert rewrite(PASS, gm)
    assert [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.rand.default] == drawn


def test_rows_may_differ_in_number():
    def f(x, y, weight, bias):
        return F.linear(x, weight.t(), bias).sin(), F.linear(y, weight.t(), bias).cos()

    model = Wrapped(f, WEIGHT, torch.ones(10))
    assert_trains(PASS, model, torch.randn(2, 4), torch.randn(5, 4), dtypes=EXACT)


def chain(x, weight):
    return ((x[0] @ weight)[:, :4] @ weight)[:, :4] @ weight


def checkpointed(x, weight):
    return checkpoint(lambda x: steps(x, weight), x, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [
        chain,
        checkpointed,
        lambda x, w: (x[0] @ w) + (x[1] @ (w + 1)),
        lambda x, w: x.flatten(0, 1) @ w,
        lambda x, w: torch.addmm(x[0, :, :1], x[0], w) + torch.addmm(x[1, :, :1], x[1], w),
        lambda x, w: torch.addmm(w[0], x[0], w, beta=2) + torch.addmm(w[0], x[1], w, beta=2),
        lambda x, w: (x[:, :, :1].transpose(1, 2) @ x[:, :, 1:]).sum(0) + w[0, 0],
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, WEIGHT)


def test_left_alone_with_many_rows_and_with_few_columns():
    assert_left_alone(ConcatMatmuls(max_rows=1), steps, X, WEIGHT)
    assert_left_alone(PASS, steps, X, WEIGHT[:, :1])


def test_left_alone_where_memory_is_written_to():
    def f(x, weight):
        first = x[0] @ weight
        x[1].mul_(2)
        return first.sin() + x[1] @ weight

    compiled = torch.compile(f, backend=backend, options={"passes": ["default", PASS], "compiler": "eager"})
    x = X.clone()
    torch.testing.assert_close(compiled(x, WEIGHT), (X[0] @ WEIGHT).sin() + 2 * X[1] @ WEIGHT)
    assert torch.equal(x[1], X[1] * 2)


def test_left_alone_with_symbolic_sizes():
    gm = captured(steps, X, WEIGHT, dynamic=True)
    assert not rewrite(PASS, gm)


@pytest.mark.slow
def test_checks_of_values_raise_no_alarm():
    torch._dynamo.reset()
    fxpasses.reset_stats()
    options = {
        "passes": ["default", PASS, "default"],
        "check": "values",
        "regions": "off",
        "compiler": "eager",
    }
    compiled = torch.compile(Recurrent(dropout=0.5), backend=backend, options=options)
    for _ in range(2):
        compiled(X[:2]).sum().backward()
    assert fxpasses.stats().pass_changes["concat_matmuls"] == 1
