import pytest
import torch
from torch import nn

import fxpasses
from fxpasses import PassManager
from fxpasses.backend import fxpasses as backend
from fxpasses.graphs.onednn import has_onednn, onednn_pixelwise, onednn_pixelwise_weight
from fxpasses.passes import UseOnednnConvolutions
from tests.fxpasses.passes.support import assert_left_alone, captured

PASS = UseOnednnConvolutions(min_multiplications=1)
FORMATS = (torch.contiguous_format, torch.channels_last)
aten = torch.ops.aten

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (6, 8, 16), (16, 8, 4)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", FORMATS)
def test_the_operators_compute_what_convolutions_do(sizes, bias, layout):
    torch.manual_seed(0)
    size, channels, out = sizes
    x = torch.randn(2, channels, size, size).contiguous(memory_format=layout)
    weight, added = torch.randn(out, channels, 1, 1), torch.randn(out) if bias else None
    expected = aten.convolution.default(x, weight, added, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    got = onednn_pixelwise(x, weight, added, x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride() or 1 in x.shape
    grad = torch.randn_like(expected)
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    of_x, of_weight, _ = aten.convolution_backward.default(grad, x, weight, [0], *how)
    torch.testing.assert_close(onednn_pixelwise(grad, weight.permute(1, 0, 2, 3), None, x), of_x)
    torch.testing.assert_close(onednn_pixelwise_weight(grad, x), of_weight)


class Net(nn.Module):
    """A block of a residual net: convolutions of pixels that widen and narrow, with and without bias, and one of neighbours."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False),
            nn.ReLU(),
        )  # fmt: skip
        self.end = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.end(self.layers(x)).mean((2, 3))


def assert_trains_alike(options, x, **more):
    torch.manual_seed(0)
    model = Net()
    fxpasses.reset_stats()
    compiled = torch.compile(model, backend=backend, options=options, **more)
    x.requires_grad_()
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        x.grad = None
        run(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    # The gradient of a bias before a batch norm is rounding alone.
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", FORMATS)
def test_training_and_inference(dynamic, layout):
    options = {"passes": ["default", PASS, "default"], "compiler": "eager"}
    assert_trains_alike(options, torch.randn(4, 3, 6, 6).contiguous(memory_format=layout), dynamic=dynamic)
    assert fxpasses.stats().pass_changes["use_onednn_convolutions"] == 3  # forward, backward, inference


@pytest.mark.parametrize("layout", FORMATS)
def test_through_inductor(layout):
    options = {"passes": ["default", PASS, "default"]}
    assert_trains_alike(options, torch.randn(4, 3, 6, 6).contiguous(memory_format=layout), dynamic=False)


def test_its_rewrites_are_proved_equal(tmp_path):
    torch.manual_seed(0)
    model = Net()
    options = {"passes": ["default", PASS], "compiler": "eager"}
    report = fxpasses.check(model, torch.randn(2, 3, 5, 5), options=options)
    assert report.ok, str(report)
    assert "use_onednn_convolutions" in str(report)


def conv(*sizes, **how):
    layer = nn.Conv2d(*sizes, **how)
    weight = layer.weight.detach()
    return lambda x: torch.nn.functional.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (conv(4, 8, 3, padding=1), torch.randn(2, 4, 6, 6)),
        (conv(4, 8, 1, stride=2), torch.randn(2, 4, 6, 6)),
        (conv(4, 8, 1, padding=1), torch.randn(2, 4, 6, 6)),
        (conv(4, 8, 1, groups=2), torch.randn(2, 4, 6, 6)),
        (conv(4, 8, 1, dtype=torch.float64), torch.randn(2, 4, 6, 6, dtype=torch.float64)),
        (conv(4, 8, 1), torch.randn(0, 4, 6, 6)),
        (nn.Conv1d(4, 8, 1).requires_grad_(False), torch.randn(2, 4, 6)),
        (nn.ConvTranspose2d(4, 8, 1).requires_grad_(False), torch.randn(2, 4, 6, 6)),
    ],
)
def test_left_alone(function, x):
    assert_left_alone(PASS, function, x)


def test_small_convolutions_are_left_alone():
    assert_left_alone(UseOnednnConvolutions(), conv(64, 64, 1), torch.randn(1, 64, 8, 8))
    gm = captured(conv(64, 64, 1), torch.randn(1, 64, 16, 16))
    (run,) = PassManager([UseOnednnConvolutions()]).run(gm, "inference")
    assert run.changed
