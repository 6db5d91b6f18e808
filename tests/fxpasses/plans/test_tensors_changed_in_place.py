"""Tensors that are given another type, shape or need of a gradient in place (``model.bfloat16()``), where only part of what a plan depends on is walked over again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses

SHIFT = torch.zeros(4)


class Settings:
    def __init__(self):
        self.scale = 2.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, settings=None):
        linear = self.linear
        y = F.linear(x.to(linear.weight.dtype), linear.weight, linear.bias)
        return y if settings is None else y * settings.scale


def shifted(x):
    return x + SHIFT


def _double(tensors):
    for tensor in tensors:
        tensor.data = tensor.data.double()


def _of_half_the_size(tensors):
    for tensor in tensors:
        tensor.data = tensor.data.to(torch.float16)


def _with_a_gradient(tensors):
    for tensor in tensors:
        tensor.requires_grad_(not tensor.requires_grad)


def _strided(tensors):
    for tensor in tensors:
        tensor.data = tensor.data.expand(2, *tensor.shape).clone()[1] * torch.arange(4)


CHANGES = [_double, _of_half_the_size, _with_a_gradient, _strided]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("new", [False, True], ids=["one object", "a new object in each call"])
def test_of_a_model_that_is_given_an_object(change, new, monkeypatch, tmp_path):
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, settings = Model(), Settings()
    compiled, x = fxpasses.compile(model), torch.randn(3, 4)
    for i in range(6):
        if i == 4:
            change(list(model.parameters()))
        _agree(compiled, model, x, Settings() if new else settings)


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_global_that_is_read(change, monkeypatch, tmp_path):
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(globals(), "SHIFT", torch.arange(4.0))
    torch._dynamo.reset()
    compiled, x = fxpasses.compile(shifted), torch.ones(3, 4)
    for i in range(6):
        if i == 4:
            change([SHIFT])
        _agree(compiled, shifted, x)


def _agree(compiled, model, *given):
    got, wanted = compiled(*given), model(*given)
    assert (got.dtype, got.requires_grad) == (wanted.dtype, wanted.requires_grad)
    torch.testing.assert_close(got, wanted)
    for result in (got, wanted):
        if result.requires_grad:
            result.sum().backward()  # with which the plan is there
