"""Changes that nobody chose: each is told apart, or is the same function in float64, too."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from benchmarks.mutations import Float64, judge
from benchmarks.mutations.changes import mutations
from benchmarks.rewrites import REWRITES, verdicts
from fxpasses.exact import Original
from fxpasses.testing.proof import _joint_inputs


def program(x, w):
    normal = functional.layer_norm(x, (6,))
    return (functional.gelu(normal @ w).softmax(-1) * x[:, 1:]).cumsum(0)


@pytest.mark.slow
def test_single_changes_are_told_apart():
    captured = fxpasses.capture(program, torch.randn(4, 6), torch.randn(6, 5, requires_grad=True))
    original = Original(captured.joint, _joint_inputs(captured, captured.joint))
    oracle = Float64(original.gm, original.inputs)
    judged = [judge(original, oracle, mutation) for mutation in list(mutations(original.gm))[::8]]
    judged = [one for one in judged if one is not None]
    assert len(judged) > 10
    assert not [one.text for one in judged if one.is_missed]
    assert [one.said for one in judged].count("DIFFERENT") > 5
    assert all(one.blamed for one in judged)


@pytest.mark.parametrize("name", ["rotary positions"])
def test_right_and_wrong_rewrites(name):
    item = REWRITES[name]
    exact, checked = verdicts(item, item.right, torch.float32, dynamic=False)
    assert exact.startswith("EQUAL"), exact
    assert checked in ("", "strides")
    exact, checked = verdicts(item, item.wrong, torch.float32, dynamic=False)
    assert exact.startswith("DIFFERENT"), exact
    assert checked
