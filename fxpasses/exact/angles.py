"""Sines and cosines of sums: by the addition theorems, from those of the terms.

What an angle is a sum of is kept beside it, as closures: nothing is computed where no sine is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fxpasses.exact.dual import Dual, Terms

if TYPE_CHECKING:
    from fxpasses.exact.arithmetic import Arithmetic

_LARGEST_MULTIPLE = 8
_DEEPEST, _MOST_TERMS = 32, 16
"""Sums of sums of more are angles of which nothing else is known."""
_NEAR = 1e-15


def sum_of(a: Dual, b: Dual, shape: torch.Size) -> Terms | None:
    """The terms of a sum; ``None`` where it is made of sums of sums of too many.

    Args:
        a: a term, or a sum itself.
        b: likewise.
        shape: of the sum, to which they are broadcast.
    """
    depth = 1 + max(of.terms.depth if of.terms is not None else 0 for of in (a, b))
    if depth > _DEEPEST:
        return None
    return Terms(lambda: [term.map(lambda t: t.expand(shape)) for of in (a, b) for term in _terms(of)], depth)


def each_of(a: Dual, function: Callable[[Dual], Dual]) -> Terms | None:
    """The terms of a linear function of a sum; ``None`` where it is none."""
    terms = a.terms
    if terms is None or terms.depth > _DEEPEST:
        return None
    return Terms(lambda: [function(term) for term in _terms(a)], terms.depth + 1)


def multiple_of(m: Arithmetic, a: Dual, b: Dual) -> Terms | None:
    """The terms of a product with a sum, or of a small multiple.

    Args:
        m: multiplies.
        a: a factor.
        b: another one.
    """
    for factor, other in ((a, b), (b, a)):
        number = float(factor.witness) if factor.witness.numel() == 1 else 0.0
        if number.is_integer() and 1 < number <= _LARGEST_MULTIPLE:
            return _repeated(other, int(number), torch.broadcast_shapes(a.shape, b.shape))
    return each_of(a, lambda term: m.mul(term, b)) or each_of(b, lambda term: m.mul(a, term))


def _repeated(a: Dual, count: int, shape: torch.Size) -> Terms:
    depth = 1 if a.terms is None else a.terms.depth + 1
    return Terms(lambda: [term.map(lambda t: t.expand(shape)) for term in _terms(a)] * count, depth)


def _terms(of: Dual) -> list[Dual]:
    """The terms of a sum of a few, or else the sum."""
    if of.terms is None or of.terms.depth > _DEEPEST:
        return [of]
    found = of.terms()
    return found if len(found) <= _MOST_TERMS else [of]


def cosine_and_sine(m: Arithmetic, a: Dual, half_tangent: Callable[[Dual], Dual]) -> tuple[Dual, Dual]:
    """Both functions of an angle.

    Args:
        m: computes.
        a: the angle.
        half_tangent: the tangent of half an angle, of which nothing else is known.
    """
    whole: tuple[Dual, Dual] | None = None
    for term in _terms(a):
        cosine, sine = _of_term(m, term, half_tangent)
        if whole is not None:
            c, s = whole
            cosine, sine = (m.sub(m.mul(c, cosine), m.mul(s, sine)), m.add(m.mul(s, cosine), m.mul(c, sine)))
        whole = cosine, sine
    assert whole is not None
    return whole


def _of_term(m: Arithmetic, a: Dual, half_tangent: Callable[[Dual], Dual]) -> tuple[Dual, Dual]:
    turns = a.witness / (math.pi / 2)
    quarter = turns.flatten()[0].round() if turns.numel() else turns.sum()
    if quarter and bool(((turns - quarter).abs() <= _NEAR * quarter.abs()).all()):  # what is written as pi
        parts = [round(f(float(quarter) * math.pi / 2)) for f in (math.cos, math.sin)]
        return tuple(m.full(a.shape, part, a.dtype or torch.float32) for part in parts)  # type: ignore[return-value]
    t = half_tangent(a)
    squared = m.mul(t, t)
    below = m.add(squared, 1)
    return m.div(m.sub(1, squared), below), m.div(m.add(t, t), below)
