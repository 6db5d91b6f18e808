"""Compiled graphs that torch saves for other processes (``caching_precompile``)."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.precompile_context import PrecompileContext
from torch._inductor.lowering import lowerings
from torch._inductor.utils import fresh_cache

import fxpasses
from fxpasses import _torch

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    PrecompileContext.clear()
    fxpasses.reset_stats()
    # Dynamo finds what it saved by the function alone, whatever backend and options it is compiled with, and what it
    # has loaded stays with the code.
    _torch.with_own_code(Blocks.forward)
    with fresh_cache(), torch._dynamo.config.patch(caching_precompile=True):
        yield
    torch._dynamo.reset()
    PrecompileContext.clear()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).relu()
        return x


def step(function, model, x):
    model.zero_grad()
    result = function(x)
    if not torch.is_grad_enabled():
        return [result]
    result.square().sum().backward()
    return [result, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "train"),
    [({"compiler": "eager"}, True), ({"regions": "always"}, True), ({"on_failure": "isolate"}, False)],
    ids=["eager", "inductor", "isolated"],
)
def test_what_is_saved_runs_without_being_compiled_again(options, train, tmp_path, monkeypatch):
    if "on_failure" in options:

        def refuse(*args, **kwargs):
            raise NotImplementedError("planted")

        monkeypatch.setitem(lowerings, aten.tanh.default, refuse)
    model, x = Blocks(), torch.randn(2, 8)
    want = copy.deepcopy(model)
    how = {"backend": "fxpasses", "options": {**options, "report": str(tmp_path)}}
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(step(torch.compile(model, **how), model, x), step(want, want, x))
        counted = fxpasses.stats()
        assert counted.graphs == 1
        assert bool(counted.isolated) == ("on_failure" in options)
        PrecompileContext.save_to_dynamo_cache()
        torch._dynamo.reset()
        PrecompileContext.clear()
        again = torch.compile(model, **how)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(step(again, model, x), step(want, want, x))
    assert fxpasses.stats().graphs == 1


def test_what_cannot_be_saved_runs_and_says_so(tmp_path, caplog):
    model, x = Blocks(), torch.randn(2, 8)
    options = {"compiler": "eager", "check": "values", "report": str(tmp_path)}
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fxpasses"):
        result = torch.compile(model, backend="fxpasses", options=options)(x)
        torch.testing.assert_close(result, model(x))
    assert any("not saved" in r.getMessage() for r in caplog.records)
