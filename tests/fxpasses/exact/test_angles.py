"""Sines and cosines of sums and multiples of angles: the addition theorems are proved, and what looks like them is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.exact import equivalent


def turned(x, angle):
    left, right = x[..., :2], x[..., 2:]
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)


SAME = {
    "a difference": (lambda a, b: (a - b).cos(), lambda a, b: a.cos() * b.cos() + a.sin() * b.sin()),
    "twice": (lambda a, b: (2 * a).sin(), lambda a, b: 2 * a.sin() * a.cos()),
    "a square": (lambda a, b: 1 - 2 * a.sin() ** 2, lambda a, b: (a + a).cos()),
    "three times": (lambda a, b: (3 * a).sin(), lambda a, b: 3 * a.sin() - 4 * a.sin() ** 3),
    "a quarter of a turn": (lambda a, b: (a + math.pi / 2).sin(), lambda a, b: a.cos()),
    "half a turn": (lambda a, b: (a - math.pi).cos(), lambda a, b: -a.cos()),
    "a product": (lambda a, b: 2 * a.sin() * b.cos(), lambda a, b: (a + b).sin() + (a - b).sin()),
    "a multiple of a difference": (
        lambda a, b: ((a - b[0]) * b).sin(),
        lambda a, b: (a * b).sin() * (b[0] * b).cos() - (a * b).cos() * (b[0] * b).sin(),
    ),
    "a quotient, seen otherwise": (
        lambda a, b: ((a[:, None] + b) / 7).flatten().cos(),
        lambda a, b: (
            (a / 7).cos()[:, None] * (b / 7).cos() - (a / 7).sin()[:, None] * (b / 7).sin()
        ).flatten(),
    ),
    "two rotations": (lambda a, b: turned(turned(a, a[:2]), b[:2]), lambda a, b: turned(a, a[:2] + b[:2])),
}
OTHER = {
    "a sum": (lambda a, b: (a + b).cos(), lambda a, b: a.cos() * b.cos() + a.sin() * b.sin()),
    "half of it": (lambda a, b: (2 * a).sin(), lambda a, b: a.sin() * a.cos()),
    "a fraction": (lambda a, b: (2.5 * a).sin(), lambda a, b: (2 * a).sin()),
    "nearly a quarter of a turn": (lambda a, b: (a + 1.570796).sin(), lambda a, b: a.cos()),
    "the other order": (lambda a, b: turned(a, a[:2] - b[:2]), lambda a, b: turned(a, b[:2] - a[:2])),
}


def judged(functions, dtype):
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, generator=generator, dtype=dtype) for _ in range(2)]
    return equivalent(*(make_fx(f)(*inputs) for f in functions), inputs).kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_addition_theorems_are_proved(name, dtype):
    assert judged(SAME[name], dtype) == "EQUAL"


@pytest.mark.parametrize("name", OTHER)
def test_what_is_none_is_another_function(name):
    assert judged(OTHER[name], torch.float64) in ("DIFFERENT", "APPROXIMATE", "UNPROVED")


@pytest.mark.parametrize("step", [lambda a, b: (a + a) * 0.5, lambda a, b: a + b, lambda a, b: (a + b).neg()])
def test_long_sums_are_no_longer_work(step):
    def summed(a, b):
        for _ in range(400):
            a = step(a, b)
        return (2 * b).cos() + a.sin()

    def other(a, b):
        return 1 - 2 * b.sin() ** 2 + (summed(a, b) - (2 * b).cos())

    assert judged((summed, other), torch.float64) == "EQUAL"
