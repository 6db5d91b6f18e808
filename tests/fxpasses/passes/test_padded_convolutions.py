import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpasses.passes import PaddedConvolutions
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = PaddedConvolutions()
X = torch.linspace(-1, 1, 2 * 4 * 6 * 5).reshape(2, 4, 6, 5).requires_grad_()
WEIGHT = torch.linspace(-1, 1, 4 * 4 * 3 * 3).reshape(4, 4, 3, 3).requires_grad_()


def padded(x, weight):
    return F.conv2d(F.pad(x, (1, 1, 2, 2)), weight)


def test_golden():
    assert_golden(PASS, padded, X, WEIGHT)


@pytest.mark.parametrize(
    "model",
    [
        Wrapped(padded, WEIGHT),
        nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=2)),
        nn.Sequential(nn.ZeroPad2d((2, 2, 0, 0)), nn.Conv2d(4, 8, 3, dilation=2)),
        nn.Sequential(nn.Tanh(), nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3)),
        Wrapped(
            lambda x, w, v: F.conv2d(F.pad(x, (1,) * 4), w) * F.conv2d(F.pad(x, (1,) * 4), v), WEIGHT, WEIGHT
        ),
        Wrapped(lambda x, w: F.conv1d(F.pad(x[..., 0], (2, 2)), w[..., 0]), WEIGHT),
    ],
)
def test_results_and_gradients(model):
    assert_trains(PASS, model, X)


def test_channels_last():
    model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3))
    x = X.detach().to(memory_format=torch.channels_last).requires_grad_()
    assert_trains(PASS, model, x, dtypes=(torch.float64,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv2d(F.pad(x, (1, 0, 1, 1)), w),  # one side only
        lambda x, w: F.conv2d(F.pad(x, (1,) * 4, value=1.0), w),
        lambda x, w: F.conv2d(F.pad(x, (1,) * 4, mode="reflect"), w),
        lambda x, w: F.conv2d(F.pad(x, (-1,) * 4), w),  # crops
        lambda x, w: F.conv_transpose2d(F.pad(x, (1,) * 4), w),
        lambda x, w: F.conv2d(x, F.pad(w, (1,) * 4)),  # the weight
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, WEIGHT)


def test_a_padded_value_that_something_else_uses_stays():
    def f(x, w):
        y = F.pad(x, (1,) * 4)
        return F.conv2d(y, w).sum() + y.sin().sum()

    assert_left_alone(PASS, f, X, WEIGHT)
