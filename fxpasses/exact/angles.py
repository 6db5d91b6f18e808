"""Sines and cosines of sums, computed from those of the terms by the addition theorems."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.sums import terms_of

_TOLERANCE = 1e-15


def cosine_and_sine(m: Arithmetic, a: Dual, half_tangent: Callable[[Dual], Dual]) -> tuple[Dual, Dual]:
    """Compute both functions of an angle.

    Args:
        m: the arithmetic.
        a: the angle.
        half_tangent: the tangent of half an angle, of which nothing else is known.
    """
    total: tuple[Dual, Dual] | None = None
    for term in terms_of(a):
        cosine, sine = _cosine_and_sine_of_term(m, term, half_tangent)
        if total is not None:
            c, s = total
            cosine, sine = (m.sub(m.mul(c, cosine), m.mul(s, sine)), m.add(m.mul(s, cosine), m.mul(c, sine)))
        total = cosine, sine
    assert total is not None
    return total


def _cosine_and_sine_of_term(
    m: Arithmetic, a: Dual, half_tangent: Callable[[Dual], Dual]
) -> tuple[Dual, Dual]:
    turns = a.witness / (math.pi / 2)
    quarter = turns.flatten()[0].round() if turns.numel() else turns.sum()
    if quarter and bool(((turns - quarter).abs() <= _TOLERANCE * quarter.abs()).all()):  # written with pi
        values = [round(f(float(quarter) * math.pi / 2)) for f in (math.cos, math.sin)]
        return tuple(m.full(a.shape, part, a.dtype or torch.float32) for part in values)  # type: ignore[return-value]
    t = half_tangent(a)
    squared = m.mul(t, t)
    denominator = m.add(squared, 1)
    return m.div(m.sub(1, squared), denominator), m.div(m.add(t, t), denominator)
