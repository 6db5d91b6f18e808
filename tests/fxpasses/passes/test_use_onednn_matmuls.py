import pytest
import torch
from torch import nn

import fxpasses
from fxpasses import PassManager
from fxpasses.backend import fxpasses as backend
from fxpasses.graphs.onednn import has_onednn, onednn_matmul
from fxpasses.passes import UseOnednnMatmuls
from tests.fxpasses.passes.support import assert_left_alone, captured

PASS = UseOnednnMatmuls(min_multiplications=1, min_rows=1)

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (40, 8, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_takes_any_strides(sizes, bias):
    rows, inner, columns = sizes
    added = torch.randn(columns) if bias else None
    for a in (torch.randn(rows, inner), torch.randn(inner, rows).t(), torch.randn(rows, 2 * inner)[:, ::2]):
        for b in (torch.randn(inner, columns), torch.randn(columns, inner).t()):
            got = onednn_matmul(a, b, added)
            torch.testing.assert_close(got, a @ b + (0 if added is None else added))
            assert got.is_contiguous()


def test_training_and_inference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    x = torch.randn(4, 8)
    for dynamic in (False, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        options = {"passes": ["default", PASS, "default"], "compiler": "eager"}
        compiled = torch.compile(model, backend=backend, options=options, dynamic=dynamic)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients)
        assert fxpasses.stats().pass_changes["use_onednn_matmuls"] == 2  # forward and backward
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (torch.mm, (torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))),
        (torch.mm, (torch.randn(4, 8), torch.randn(8, 8)[:, ::2])),
        (torch.mm, (torch.randn(4, 8), torch.randn(8, 1).expand(8, 4))),
        (torch.mm, (torch.randn(0, 8), torch.randn(8, 4))),
        (torch.addmm, (torch.randn(4, 4), torch.randn(4, 8), torch.randn(8, 4))),
        (
            lambda b, x, w: torch.addmm(b, x, w, alpha=2),
            (torch.randn(4), torch.randn(4, 8), torch.randn(8, 4)),
        ),
        (torch.bmm, (torch.randn(2, 4, 8), torch.randn(2, 8, 4))),
    ],
)
def test_left_alone(function, inputs):
    assert_left_alone(PASS, function, *inputs)


def test_sums_that_may_be_of_nothing_are_left_alone():
    gm = captured(lambda x, w: x[:, 2:] @ w[2:], torch.randn(4, 8), torch.randn(8, 4), dynamic=True)
    (run,) = PassManager([PASS]).run(gm, "inference")
    assert not run.changed


def test_small_matmuls_are_left_alone():
    assert_left_alone(UseOnednnMatmuls(), torch.mm, torch.randn(8, 64), torch.randn(64, 64))
    gm = captured(torch.mm, torch.randn(64, 256), torch.randn(256, 256))
    (run,) = PassManager([UseOnednnMatmuls()]).run(gm, "inference")
    assert run.changed


def test_through_inductor():
    weight, bias = torch.randn(64, 32), torch.randn(64)
    options = {"passes": ["default", PASS, "default"]}
    compiled = torch.compile(
        lambda x: torch.addmm(bias, x.t(), weight.t()), backend=backend, options=options, dynamic=False
    )
    x = torch.randn(32, 48)
    torch.testing.assert_close(compiled(x), torch.addmm(bias, x.t(), weight.t()))
