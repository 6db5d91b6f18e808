import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import PackSavedMasks
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = PackSavedMasks(min_elements=8)
X = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()


def clipped(x):
    return torch.where(x.sin() > 0.3, x.exp(), x.cos())


def test_golden():
    assert_golden(PASS, clipped, X)


def test_results_and_gradients():
    assert_trains(PASS, Wrapped(clipped), X)
    assert_trains(PASS, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), X)


def step(passes, compiler):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 8))
    options = {"passes": passes, "compiler": compiler}
    compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
    torch.manual_seed(1)
    compiled(X.detach()).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_bit_by_bit_with_dropout(compiler):
    without, packed = step(["default"], compiler), step(["default", PASS, "default"], compiler)
    assert all(torch.equal(a, b) for a, b in zip(without, packed, strict=True))


def test_an_eighth_is_saved():
    def saved(passes):
        model = lambda x: F.dropout(x.sin(), 0.5)  # noqa: E731
        found = fxpasses.capture(
            model, torch.randn(64, 64, requires_grad=True), passes=passes, decompose=True
        )
        return {v.dtype: v.nbytes for v in found.saved if not v.is_input}

    assert saved(["default"]) == {torch.bool: 64 * 64}
    assert saved(["default", "pack_saved_masks", "default"]) == {torch.uint8: 64 * 64 // 8}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x[:, :3].sin() > 0.3, x[:, :3].exp(), 0.0),  # 18 elements
        lambda x: torch.where(x[:1, :4].sin() > 0.3, x[:1, :4], 0.0),  # too few
        lambda x: torch.where(x.t().sin() > 0.3, x.t(), 0.0),  # not row-major
        lambda x: x.sin(),  # no mask
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X)
