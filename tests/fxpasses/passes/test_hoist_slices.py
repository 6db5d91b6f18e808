import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpasses.backend import fxpasses as backend
from fxpasses.passes import HoistSlices
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)

PASS = HoistSlices()
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def last_logits(x, weight):
    return (F.layer_norm(x, (8,)) @ weight)[:, -1]


def matmuls(gm):
    ops = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return [tuple(n.meta["val"].shape) for n in gm.graph.nodes if n.target in ops]


def test_golden():
    assert_golden(PASS, lambda x, w: last_logits(x, w).relu(), X, WEIGHT)


class Encoder(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 5)
        self.causal = causal

    def forward(self, x):
        mask = (
            nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        )
        y = self.layer(x, src_mask=mask, is_causal=self.causal)
        return self.head(y)[:, -1] if self.causal else self.head(y[:, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_only_one_row_of_a_layer_is_computed(causal):
    model = Encoder(causal)
    assert_trains(PASS, model, X, backward=False)
    with torch.no_grad():
        gm = captured(model, X)
        assert rewrite(PASS, gm)
    # Keys and values need all twelve rows; nothing else does.
    assert sorted(rows for rows, _ in matmuls(gm)) in ([2, 2, 2, 2, 12], [2, 2, 2, 2, 2, 12])


@pytest.mark.parametrize(
    "function",
    [
        last_logits,  # returned with the strides of a view
        lambda x, w: last_logits(x, w).exp(),
        lambda x, w: (x @ w)[:, 2:4].sin(),
        lambda x, w: (x @ w).transpose(1, 2)[..., 1].sin(),
        lambda x, w: (x[0] @ w)[2:3] * 2,
        lambda x, w: (x.bmm(x.transpose(1, 2)) / 3).softmax(-1)[:, 1].sin(),
        lambda x, w: x.view(2, 6, 2, 4).exp().sum(2)[:, 0].sin(),
        lambda x, w: torch.cat([x.sin(), x.cos()], 2)[:, 1:2] + 1,
        lambda x, w: F.linear(x, w.t(), w[0])[0].relu(),
    ],
)
def test_results(function):
    assert_trains(PASS, Wrapped(lambda x: function(x, WEIGHT.to(x.dtype))), X, backward=False)


def test_gradients():
    assert_trains(
        PASS, Wrapped(lambda x, w: (x @ w)[:, -1].exp(), nn.Parameter(WEIGHT)), X.clone().requires_grad_()
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w)[:, -1] + (x @ w).sum(),  # all of it is needed
        lambda x, w: (x @ w)[:, 0] + (x @ w)[:, 1],  # two different rows
        lambda x, w: x.cumsum(1)[:, -1] * 2,  # rows depend on each other
        lambda x, w: x.softmax(1).cumsum(2)[:, -1] * 2,
        lambda x, w: x[:, -1] * 2,  # an input
        lambda x, w: x.flip(1).cumsum(1)[:, 0].exp(),
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, WEIGHT)


def test_causal_attention_of_another_than_the_last_row():
    def f(q):
        return F.scaled_dot_product_attention(q[None], q[None], q[None], is_causal=True)[:, :, 2] * 2

    assert_trains(PASS, Wrapped(f), X, backward=False, fires=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[:, -1], y[:, -1][None]),
        lambda y: (y[:, -1], y[:, -1].detach()),
        lambda y: (y[:, -1], y[0, -1]),
        lambda y: (y[:, -1],) * 2,
    ],
)
def test_results_that_are_views_of_each_other_stay_that(function):
    @torch.no_grad()
    def addresses(model):
        results = model(X)
        torch.testing.assert_close(results, function(X.sin()))
        return len({result.untyped_storage().data_ptr() for result in results})

    options = {"passes": ["default", PASS, "default"], "compiler": "eager"}
    assert addresses(torch.compile(lambda x: function(x.sin()), backend=backend, options=options)) == 1
