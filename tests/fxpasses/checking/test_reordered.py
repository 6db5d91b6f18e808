"""Sums in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.checking.interpret import RoundedRun
from fxpasses.checking.reordered import largest_part
from fxpasses.checking.tolerance import deviation

aten = torch.ops.aten


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 5, 5)


CALLS = {
    "mm": (aten.mm.default, lambda: (torch.randn(3, 7), torch.randn(7, 4))),
    "bmm": (aten.bmm.default, lambda: (torch.randn(2, 3, 7), torch.randn(2, 7, 4))),
    "addmm": (aten.addmm.default, lambda: (torch.randn(4), torch.randn(3, 7), torch.randn(7, 4))),
    "baddbmm": (
        aten.baddbmm.default,
        lambda: (torch.randn(2, 3, 4), torch.randn(2, 3, 7), torch.randn(2, 7, 4)),
    ),
    "sum": (aten.sum.default, lambda: (torch.randn(3, 4),)),
    "sum of dimensions": (aten.sum.dim_IntList, lambda: (torch.randn(3, 4, 5), [0, -1], True)),
    "sum of all": (aten.sum.dim_IntList, lambda: (torch.randn(3, 4), [])),
    "mean": (aten.mean.dim, lambda: (torch.randn(3, 4), [-1], True)),
    "mean of all": (aten.mean.default, lambda: (torch.randn(3, 4),)),
    "convolution": (
        aten.convolution.default,
        lambda: (_image(), torch.randn(4, 3, 3, 3), torch.randn(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_largest_part_has_the_shape_of_the_result_and_is_not_smaller(name):
    target, made = CALLS[name]
    args = made()
    result, part = target(*args), largest_part(target, args, {})
    bias = 4 * args[0].abs().max().item() if name in ("addmm", "baddbmm") else 0.0  # is no part
    bias = 4 * args[2].abs().max().item() if name == "convolution" else bias
    assert part.shape == result.shape
    assert (part >= result.double().abs() * (1 - 1e-5) - bias).all()


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8), st.data())
def test_no_seam_makes_a_larger_part(terms, data):
    seam = data.draw(st.integers(1, len(terms) - 1))
    values = torch.tensor(terms, dtype=torch.float64)
    part = largest_part(aten.sum.dim_IntList, (values.view(1, -1), [1]), {}).item()
    assert part >= max(abs(sum(terms[:seam])), abs(sum(terms[seam:])), abs(sum(terms)))


def test_a_product_in_two_parts_is_no_fault_where_the_whole_is_exact():
    # Multiples of a half: the products are exact, sums of them are not always, and some are zero.
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, b = ((6 * torch.randn(24, 32, generator=generator)).round() / 2 for _ in range(2))
        a, b = a.bfloat16(), b.bfloat16().t().contiguous()
        gm = make_fx(lambda a, b: a @ b, tracing_mode="fake")(a, b)
        samples = [RoundedRun(gm, k)([a, b])[0] for k in range(10)]
        stable = [RoundedRun(gm, k, reordered=True)([a, b])[0] for k in range(10)]
        parts = a[:, :16] @ b[:16] + a[:, 16:] @ b[16:]
        exact = a.double() @ b.double()
        assert deviation(a @ b, exact, samples, parts, stable=stable) is None
        wrong = parts.clone()
        wrong[3, 4] += 16
        assert deviation(a @ b, exact, samples, wrong, stable=stable) is not None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(2))),
        (aten.sum.default, (torch.ones(3, dtype=torch.int64),)),
        (aten.sum.default, (torch.ones(()),)),
        (
            aten.convolution.default,
            (_image(), torch.ones(3, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 3),
        ),
    ],
)
def test_what_has_no_parts(target, args):
    assert largest_part(target, args, {}) is None
