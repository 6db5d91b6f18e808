"""A wrong lowering of Inductor's is found, cut down and written to a file that shows it alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
from torch._inductor.virtualized import ops

import fxpasses
from fxpasses.checking.faults.repro import recorded_calls
from fxpasses.checking.stages.lowered import LoweringCheck, differences
from tests.fxpasses.checking.repros import in_a_new_process, in_this_process

aten = torch.ops.aten


def too_large_tanh(x):
    def inner(value):
        return ops.mul(ops.tanh(value), ops.constant(1.01, torch.float32))

    return make_pointwise(inner)(x)


def raises(x):
    raise ValueError("no such kernel")


@pytest.fixture
def lowering(monkeypatch):
    def plant(function):
        known = dict(lowerings)
        register_lowering(aten.tanh.default, type_promotion_kind=None)(function)
        planted = {key: value for key, value in lowerings.items() if known.get(key) is not value}
        lowerings.update(known)
        for key, value in planted.items():
            monkeypatch.setitem(lowerings, key, value)

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield plant
    torch._dynamo.reset()


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid())


@pytest.mark.slow
@torch.no_grad()
def test_check_writes_a_repro_file(lowering, tmp_path):
    lowering(too_large_tanh)
    result = fxpasses.check(
        model(), torch.randn(3, 4), options={"report": str(tmp_path)}, backward=False, show=False
    )
    assert [stage.stage for stage in result.stages if not stage.ok] == ["inductor"]
    assert "shows what Inductor does on 1 call" in str(result)
    file = tmp_path / "fxpasses_repros" / "inductor" / "repro.py"
    assert "register_lowering(torch.ops.aten.tanh.default" in file.read_text()
    assert "aten.sigmoid" not in file.read_text()
    status, output, errors = in_a_new_process(file)
    assert status == 1, errors
    assert "Inductor is wrong: output 0: off by" in output


@pytest.mark.slow
def test_a_lowering_that_raises(lowering, tmp_path):
    lowering(raises)
    gm = fxpasses.capture(model().eval().requires_grad_(False), torch.randn(3, 4)).forward
    check = LoweringCheck(tmp_path)
    check.failed(gm, ValueError("no such kernel"))
    assert check.calls == 1
    status, output, _ = in_this_process(check.repro)  # the fixture takes the lowering away again
    assert status == 1
    assert "no such kernel" in output


@pytest.mark.slow
def test_what_inductor_does_right_is_right():
    gm = recorded_calls(lambda x, y: (aten.mm.default(x, y), aten.exp.default(x)))
    assert differences(gm, [torch.randn(3, 4), torch.randn(4, 5)]) == ""
