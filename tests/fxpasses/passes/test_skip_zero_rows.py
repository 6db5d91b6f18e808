import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import HoistSlices, SkipZeroRows
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)
from tests.models.support import assert_agrees

PASS = SkipZeroRows()
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
WEIGHT = torch.linspace(-1, 1, 8 * 5).reshape(8, 5).requires_grad_()
BIAS = torch.linspace(-1, 1, 5).requires_grad_()
DTYPES = (torch.float64, torch.bfloat16)


def first(x, weight):
    return (x.sin() @ weight)[:, 0]


def rows_of_products(gm):
    return sorted(
        n.all_input_nodes[0].meta["val"].shape[0]
        for n in gm.graph.nodes
        if n.target is torch.ops.aten.mm.default
    )


def test_golden():
    assert_golden(PASS, first, X, WEIGHT)


@pytest.mark.parametrize(
    "function",
    [
        first,
        lambda x, w: (x @ w)[:, 1:3].exp(),
        lambda x, w: (x.relu() @ w).transpose(1, 2)[..., -1],
        lambda x, w: ((x @ w).tanh() @ w.t())[:, 0] * 2,
        lambda x, w: (F.layer_norm(x, (8,)) @ w)[:, 0] + (x @ w).sum(),
        lambda x, w: (x @ w)[:, 0] * (x @ w)[:, 5],  # two gradients
        lambda x, w: (x @ w)[1, 2],
        lambda x, w: (F.gelu(x @ w) @ w.t() + x)[:, 3],
    ],
)
def test_results_and_gradients(function):
    assert_trains(PASS, Wrapped(function, WEIGHT), X, dtypes=DTYPES)


def test_biases():
    assert_trains(
        PASS,
        Wrapped(lambda x, w, b: F.linear(x, w, b)[:, 0], nn.Parameter(WEIGHT.t()), BIAS),
        X,
        dtypes=DTYPES,
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(x))[:, 0]


@pytest.mark.slow
def test_with_early_selection_a_layer_is_trained_on_one_row():
    model = Encoder()

    def compile(m):
        torch._dynamo.reset()
        passes = ["default", PASS, "default", HoistSlices(), "default"]
        return torch.compile(
            m, backend=backend, options={"passes": passes, "compiler": "eager"}, dynamic=False
        )

    for dtype in (torch.float64, torch.bfloat16):
        assert_agrees(model, compile, [(X,)], dtype)
    gm = captured(model, X)
    before = rows_of_products(gm).count(12)
    assert rewrite(PASS, gm)
    assert rewrite(HoistSlices(), gm)
    assert rows_of_products(gm).count(12) <= before // 2


def test_fewer_values_are_saved():
    def saved(*passes):
        found = fxpasses.capture(Encoder(), X, passes=["default", *passes], decompose=True)
        return found.saved_bytes

    assert saved(PASS, "default", "hoist_slices", "default") < saved() * 0.8


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.sin()[:, 0] * w.sum(),  # no matmul
        lambda x, w: (x @ w).cumsum(1)[:, 0],  # spreads over all rows before it reaches the matmul
        lambda x, w: (x @ w).softmax(1)[:, 0],
        lambda x, w: (x @ w).sin(),  # nothing is zero
        lambda x, w: (x @ w)[..., 0],  # columns
    ],
)
def test_products_stay(function):
    gm = captured(function, X, WEIGHT)
    before = rows_of_products(gm)
    rewrite(PASS, gm)
    assert rows_of_products(gm) == before


def test_no_gradients():
    assert_left_alone(PASS, lambda x: torch.zeros(2, 6, 8).slice_scatter(x[:, :1], 1, 0, 1).sin(), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v: F.linear(x.transpose(0, 1) @ w.t(), v)[0].pow(
            2
        ),  # the gradient of x has strides of its own
        lambda x, w, v: F.linear(F.linear(x, w).relu(), v)[:, -2:],  # counted from the end
    ],
)
def test_other_strides_and_bounds(function):
    x, w, v = torch.randn(3, 5, 8), torch.randn(6, 8), torch.randn(6, 6)
    assert_trains(PASS, Wrapped(function, w, v), x.requires_grad_(), dtypes=(torch.float64,))
