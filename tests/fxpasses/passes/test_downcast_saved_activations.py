import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import DowncastSavedActivations
from tests.fxpasses.passes.support import assert_golden, assert_left_alone

PASS = DowncastSavedActivations(min_elements=8)
X = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()


def test_golden():
    assert_golden(PASS, lambda x: x.tanh().exp(), X)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_forward_is_exact_and_gradients_are_close(compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
    wanted = model(X)
    exact = torch.autograd.grad(wanted.square().sum(), model.parameters())
    torch._dynamo.reset()
    options = {"passes": ["default", PASS, "default"], "compiler": compiler}
    out = torch.compile(model, backend=backend, options=options, dynamic=False)(X)
    close = torch.autograd.grad(out.square().sum(), model.parameters())
    torch.testing.assert_close(out, wanted)
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(exact, close, strict=True)]
    assert max(errors) < 2**-7
    if compiler == "eager":  # Inductor may leave out a rounding inside of a kernel
        assert max(errors) > 1e-5


def test_half_is_saved():
    def saved(passes):
        x = torch.randn(256, 256, requires_grad=True)
        return fxpasses.capture(lambda x: x.sin().tanh(), x, passes=passes, decompose=True).saved_bytes

    assert saved(["default", "downcast_saved_activations", "default"]) * 2 == saved(["default"])


def test_signs_zeros_and_extremes_stay():
    values = torch.tensor([0.0, -0.0, 1e-40, -1e38, float("inf"), float("nan"), 3e38, -1e-38])
    rounded = values.bfloat16().float()
    assert torch.equal(values.sign().nan_to_num(7), rounded.sign().nan_to_num(7))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.tanh(), X.detach().double().requires_grad_()),
        (lambda x: x.tanh(), X.detach().bfloat16().requires_grad_()),
        (lambda x: x.narrow(0, 0, 1)[:, :4].tanh(), X),  # small
        (lambda x: x * 2, X),  # nothing is saved
    ],
)
def test_left_alone(function, x):
    assert_left_alone(PASS, function, x)
