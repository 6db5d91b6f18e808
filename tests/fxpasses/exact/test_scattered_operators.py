"""Operators that few models call, with their gradients: segments, factors that are scattered, grids, histograms, arcs, complex matmuls."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses
from fxpasses.exact import equivalent

aten = torch.ops.aten
INDEX, LENGTHS = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([2, 3, 1])


def made(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(size))
    return torch.randn(*size, generator=generator).requires_grad_()


def chosen(i: Tensor, v: Tensor, other: float) -> Tensor:
    return torch.where(i == torch.arange(3)[:, None], v, other)


def parts(a: Tensor, b: Tensor, sign: float = 1.0) -> Tensor:
    (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ar @ br - ai @ bi, ar @ bi + sign * (ai @ br)], -1)


def three_products(a: Tensor, b: Tensor) -> Tensor:
    (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
    first = (ar + ai) @ br
    return torch.stack([first - ai @ (br + bi), first + ar @ (bi - br)], -1)


def as_complex(a: Tensor, b: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(a) @ torch.view_as_complex(b))


def sampled(mode: str, padding: str, aligned: bool, factor: float = 1.0, twice: float = 2.0):
    def call(x: Tensor, g: Tensor) -> Tensor:
        return twice * F.grid_sample(factor * x, g.tanh(), mode, padding, aligned)

    return call


GRIDS = {
    f"a grid, {mode}, {padding}, {aligned}": (
        [made(1, 2, 4, 5), made(1, 3, 2, 2)],
        sampled(mode, padding, aligned),
        sampled(mode, padding, aligned, 2.0, 1.0),
        sampled(mode, padding, not aligned, 2.0, 1.0),
    )
    for mode in ("bilinear", "nearest")
    for padding in ("zeros", "border")
    for aligned in (True, False)
}
CASES = {
    **GRIDS,
    "factors that are scattered": (
        [made(3), made(5), INDEX],
        lambda x, v, i: x.scatter_reduce(0, i, v, "prod"),
        lambda x, v, i: x * chosen(i, v, 1.0).prod(1),
        lambda x, v, i: x * chosen(i, v, 1.0).sum(1),
    ),
    "factors without what was there": (
        [made(3), made(5), INDEX],
        lambda x, v, i: x + torch.zeros(3).scatter_reduce(0, i, v, "prod", include_self=False),
        lambda x, v, i: x + chosen(i, v, 1.0).prod(1),
        lambda x, v, i: x + x * chosen(i, v, 1.0).prod(1),
    ),
    **{
        f"the {how} of segments": (
            [made(6, 2), LENGTHS],
            lambda x, n, how=how: torch.segment_reduce(3 * x, how, lengths=n, axis=0),
            lambda x, n, how=how: 3 * torch.segment_reduce(x, how, lengths=n, axis=0),
            lambda x, n, how=how: 3 * torch.segment_reduce(x, how, lengths=n.flip(0), axis=0),
        )
        for how in ("sum", "mean", "max", "min")
    },
    "a convolution with time first": (
        [made(5, 2, 3), made(3, 3, 4), made(4)],
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        lambda x, w, b: F.conv1d(x.permute(1, 2, 0), w.permute(2, 1, 0), b, padding=1).permute(2, 0, 1),
        lambda x, w, b: F.conv1d(x.permute(1, 2, 0), w.permute(2, 1, 0).flip(2), b, padding=1).permute(
            2, 0, 1
        ),
    ),
    "an angle": (
        [made(7), made(7, seed=1)],
        lambda y, x: torch.atan2(3 * y, 3 * x),
        torch.atan2,
        lambda y, x: torch.atan2(y, -x),
    ),
    "an angle by cases": (
        [made(7), made(7, seed=1)],
        torch.atan2,
        lambda y, x: torch.atan(y / x) + torch.where(x > 0, 0.0, torch.where(y >= 0, math.pi, -math.pi)),
        lambda y, x: torch.atan(y / x),
    ),
    "odd functions": (
        [made(6)],
        lambda x: torch.asinh(-x) + torch.atan(-x),
        lambda x: -torch.asinh(x) - torch.atan(x),
        lambda x: torch.asinh(x) - torch.atan(x),
    ),
}
HELD = {
    "a histogram": (
        [made(20).detach()],
        lambda x: torch.histc(x, 4, -2, 2),
        lambda x: torch.histc(x * 2, 4, -4, 4),
        lambda x: torch.histc(x, 4, -2, 3),
    ),
    **{
        f"a product of complex matrices: {name}": (
            [made(3, 3, 2).detach(), made(3, 3, 2, seed=1).detach()],
            as_complex,
            right,
            lambda a, b: parts(a, b, -1.0),
        )
        for name, right in (("four", parts), ("three", three_products))
    },
}


def in_order(f):
    """All inputs are taken, in their order."""
    return lambda *inputs: (*(value * 2 for value in inputs), f(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *HELD])
def test_one_way_to_compute_it_is_another_one(name):
    inputs, before, right, wrong = (CASES | HELD)[name]
    captured = [fxpasses.capture(in_order(f), *inputs) for f in (before, right, wrong)]
    graphs = [each.joint if name in CASES else each.forward for each in captured]
    last = graphs[0].graph.find_nodes(op="placeholder")[len(inputs) :]
    values = [*inputs, *(torch.randn(node.meta["val"].shape) for node in last)]
    proved, refuted = equivalent(graphs[0], graphs[1], values), equivalent(graphs[0], graphs[2], values)
    assert proved.kind == "EQUAL", str(proved)
    assert refuted.kind == "DIFFERENT", str(refuted)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("aligned", [True, False])
def test_gradients_of_grids_are_those_of_the_kernel(mode, padding, aligned):
    from fxpasses.exact.fields import field
    from fxpasses.exact.machine import Machine

    torch.manual_seed(mode + 2 * padding)
    machine = Machine(field(0), 0)
    given = [torch.randn(s, dtype=torch.float64) for s in ((2, 3, 4, 4), (2, 3, 5, 6), (2, 4, 4, 2))]
    op = aten.grid_sampler_2d_backward.default
    duals = [machine.arithmetic.dual(value) for value in given]
    found = machine.call(op, [*duals, mode, padding, aligned, [True, True]], {})
    for one, other in zip(found, op(*given, mode, padding, aligned, [True, True]), strict=True):
        torch.testing.assert_close(one.witness, other)
    assert not machine.opaque
