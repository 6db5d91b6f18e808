"""What a value is a sum of, as closures that compute nothing until :mod:`fxpasses.exact.angles` asks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxpasses.exact.dual import Dual, Terms

_LARGEST_MULTIPLE = 8
_DEEPEST, _MOST_TERMS = 32, 16
"""Of sums of sums of more the terms are not kept."""


def sum_of(a: Dual, b: Dual, shape: torch.Size) -> Terms | None:
    """The terms of a sum; ``None`` if sums are nested too deep.

    Args:
        a: a term, or a sum itself.
        b: likewise.
        shape: of the sum, to which they are broadcast.
    """
    depth = 1 + max(of.terms.depth if of.terms is not None else 0 for of in (a, b))
    if depth > _DEEPEST:
        return None
    return Terms(
        lambda: [term.map(lambda t: t.expand(shape)) for of in (a, b) for term in terms_of(of)], depth
    )


def each_of(a: Dual, function: Callable[[Dual], Dual]) -> Terms | None:
    """The terms of a linear function of a sum; ``None`` if it is not a sum."""
    terms = a.terms
    if terms is None or terms.depth > _DEEPEST:
        return None
    return Terms(lambda: [function(term) for term in terms_of(a)], terms.depth + 1)


def multiple_of(mul: Callable[[Dual, Dual], Dual], a: Dual, b: Dual) -> Terms | None:
    """Return the terms of a product with a sum, or of a small multiple.

    Args:
        mul: multiplies.
        a: a factor.
        b: the other one.
    """
    for factor, other in ((a, b), (b, a)):
        number = float(factor.witness) if factor.witness.numel() == 1 else 0.0
        if number.is_integer() and 1 < number <= _LARGEST_MULTIPLE:
            return _repeated(other, int(number), torch.broadcast_shapes(a.shape, b.shape))
    return each_of(a, lambda term: mul(term, b)) or each_of(b, lambda term: mul(a, term))


def _repeated(a: Dual, count: int, shape: torch.Size) -> Terms:
    depth = 1 if a.terms is None else a.terms.depth + 1
    return Terms(lambda: [term.map(lambda t: t.expand(shape)) for term in terms_of(a)] * count, depth)


def terms_of(of: Dual) -> list[Dual]:
    """The terms of a sum of a few, else the value itself."""
    if of.terms is None or of.terms.depth > _DEEPEST:
        return [of]
    found = of.terms()
    return found if len(found) <= _MOST_TERMS else [of]
