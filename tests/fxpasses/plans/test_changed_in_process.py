"""Changes that Dynamo's guards do not ask for, after a plan was written in the same process: what a plan watches is looked at again by tracing."""

import collections
import copy
import importlib
import os
import sys

import pytest
import torch
from torch import nn

import fxpasses


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.factors = collections.OrderedDict(a=1.0, b=2.0)

    def forward(self, x):
        x = self.linear(x).clamp(max=1e4)
        for number, name in enumerate(self.factors):
            x = x + number * self.factors[name]
        return x * 2 if os.environ.get("FXPASSES_TEST_DOUBLES") else x


def _other_clamp(model, patch):
    patch.setattr(torch.Tensor, "clamp", lambda x, max: x * 3)


def _other_linear(model, patch):
    patch.setattr(nn.Linear, "forward", lambda self, x: x * 2 + 1)


def _other_order(model, patch):
    model.factors.move_to_end("a")


def _other_environment(model, patch):
    patch.setenv("FXPASSES_TEST_DOUBLES", "1")


def _a_hook(model, patch):
    patch.setitem(model._forward_hooks, 1, lambda module, given, result: result * 2)


@pytest.mark.parametrize("change", [_other_clamp, _other_linear, _other_order, _other_environment, _a_hook])
@pytest.mark.parametrize("how", ["torch.compile", "fxpasses.compile", "module.compile"])
def test_the_next_call_sees_it(change, how, monkeypatch, tmp_path):
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model, x = Clamps(), torch.ones(3, 2)
    if how == "torch.compile":
        compiled = torch.compile(model, backend="fxpasses")
    elif how == "module.compile":
        compiled, model = model, copy.deepcopy(model)
        compiled.compile(backend="fxpasses")
    else:
        compiled = fxpasses.compile(model)
    with torch.no_grad():
        usual = model(x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), usual)
        with pytest.MonkeyPatch.context() as patch:
            for one in {model, compiled} if how == "module.compile" else {model}:
                change(one, patch)
            for _ in range(3):
                torch.testing.assert_close(compiled(x), model(x))
            assert not torch.allclose(model(x), usual)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))


def test_a_module_that_traced_code_imports_is_there_from_the_first_call_on(monkeypatch, tmp_path):
    (tmp_path / "imported_in_a_call.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "imports_in_a_call.py").write_text(
        "def scaled(x):\n    from imported_in_a_call import FACTOR\n\n    return x * FACTOR\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "plans"
    for _ in range(2):  # as in another process
        torch._dynamo.reset()
        fxpasses.reset_stats()
        for name in ("imported_in_a_call", "imports_in_a_call"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        compiled = fxpasses.compile(importlib.import_module("imports_in_a_call").scaled, cache=cache)
        for _ in range(4):
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert (fxpasses.stats().graphs, fxpasses.stats().plans_used) == (1, 1)
        sys.modules["imported_in_a_call"].FACTOR = 3.0
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
