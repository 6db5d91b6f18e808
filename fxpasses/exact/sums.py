"""What a value is a sum of, as closures that compute nothing until :mod:`fxpasses.exact.angles` asks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxpasses.exact.dual import Dual, Terms

_MAX_MULTIPLE = 8
_MAX_DEPTH, _MAX_TERMS = 32, 16
"""Of sums of sums of more the terms are not kept."""


def terms_of_sum(a: Dual, b: Dual, shape: torch.Size) -> Terms | None:
    """The terms of a sum; ``None`` if sums are nested too deep.

    Args:
        a: a term, or a sum itself.
        b: likewise.
        shape: of the sum, to which they are broadcast.
    """
    depth = 1 + max(operand.terms.depth if operand.terms is not None else 0 for operand in (a, b))
    if depth > _MAX_DEPTH:
        return None
    return Terms(
        lambda: [term.map(lambda t: t.expand(shape)) for operand in (a, b) for term in terms_of(operand)],
        depth,
    )


def map_terms(a: Dual, function: Callable[[Dual], Dual]) -> Terms | None:
    """The terms of a linear function of a sum; ``None`` if it is not a sum."""
    terms = a.terms
    if terms is None or terms.depth > _MAX_DEPTH:
        return None
    return Terms(lambda: [function(term) for term in terms_of(a)], terms.depth + 1)


def terms_of_product(mul: Callable[[Dual, Dual], Dual], a: Dual, b: Dual) -> Terms | None:
    """Return the terms of a product with a sum, or of a small multiple.

    Args:
        mul: multiplies.
        a: a factor.
        b: the other one.
    """
    for factor, other in ((a, b), (b, a)):
        number = float(factor.witness) if factor.witness.numel() == 1 else 0.0
        if number.is_integer() and 1 < number <= _MAX_MULTIPLE:
            return _terms_of_multiple(other, int(number), torch.broadcast_shapes(a.shape, b.shape))
    return map_terms(a, lambda term: mul(term, b)) or map_terms(b, lambda term: mul(a, term))


def _terms_of_multiple(a: Dual, count: int, shape: torch.Size) -> Terms:
    depth = 1 if a.terms is None else a.terms.depth + 1
    return Terms(lambda: [term.map(lambda t: t.expand(shape)) for term in terms_of(a)] * count, depth)


def terms_of(operand: Dual) -> list[Dual]:
    """The terms of a sum of a few, else the value itself."""
    if operand.terms is None or operand.terms.depth > _MAX_DEPTH:
        return [operand]
    found = operand.terms()
    return found if len(found) <= _MAX_TERMS else [operand]
