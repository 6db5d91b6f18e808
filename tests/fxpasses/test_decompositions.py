"""What Inductor gets wrong is taken apart differently: gradients of average pooling against eager."""

import pytest
import torch
from torch.nn import functional as F

from fxpasses.graphs.decompositions import decompositions

aten = torch.ops.aten
SETTINGS = {
    "beyond the end": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "and padding": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "other dimensions": {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True},
    "without padding": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
    "a divisor": {"kernel_size": 3, "stride": 2, "ceil_mode": True, "divisor_override": 5},
    "inside": {"kernel_size": 2, "ceil_mode": True},
}  # fmt: skip


def gradients(run, x):
    x = x.clone().requires_grad_()
    y = run(x)
    (found,) = torch.autograd.grad(y, x, torch.linspace(1, 2, y.numel()).view_as(y))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_average_pooling(dynamic):
    def pooled(x):
        in_one = F.avg_pool1d(x[0], 3, 2, ceil_mode=True)
        return (
            in_one
            if dynamic
            else torch.cat([in_one.flatten(), F.avg_pool3d(x, 2, 3, 1, ceil_mode=True).flatten()])
        )

    x = torch.randn(1, 2, 3, 6)
    compiled = torch.compile(pooled, backend="fxpasses", dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled, x), gradients(pooled, x))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_decomposition_itself(name):
    how = SETTINGS[name]
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    y = F.avg_pool2d(x, **how)
    gradient = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y)
    given = [how.get(k, d) for k, d in (("kernel_size", None), ("stride", ()), ("padding", 0))]
    lists = [[v] if isinstance(v, int) else list(v) for v in given]
    rest = how["ceil_mode"], how.get("count_include_pad", True), how.get("divisor_override")
    target = aten.avg_pool2d_backward.default
    found = decompositions()[target](gradient, x, *lists, *rest)
    torch.testing.assert_close(found, target(gradient, x, *lists, *rest), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(1, 2, 6, 7, 8), (3, 4, 5, 8)])
def test_three_dimensions(shape):
    x = torch.randn(*shape, dtype=torch.float64)
    how = [3, 2, 2], [2, 3, 2], [1, 0, 1], True, True, None
    y = aten.avg_pool3d(x, *how)
    target = aten.avg_pool3d_backward.default
    found = decompositions()[target](y.sin(), x, *how)
    torch.testing.assert_close(found, target(y.sin(), x, *how))


def test_what_is_right_already_is_left_alone():
    x, how = torch.randn(1, 2, 8, 8), ([2, 2], [2, 2], [0, 0], True, True, None)
    gradient = torch.randn(1, 2, 4, 4)
    assert decompositions()[aten.avg_pool2d_backward.default](gradient, x, *how) is NotImplemented
