"""Numbers that a rewrite computed from others.

For example ``(x / 255 - 0.485) / 0.229`` is ``x * 0.01712... - 2.1179...``. A number of the graph after that
has no meaning of its own is looked up among products of the numbers of the graph before and their integer
powers, and sums and differences of two of these. It gets the residues of what it was computed from. Three
numbers give tens of millions of candidates; one is this close by chance once in a million times.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpasses.exact.fields import Field, inverses
from fxpasses.exact.float_constants import means_something, residues_of_number, unrounded

Product = tuple[tuple[float, float], ...]
"""Numbers with their exponents, which are integers or halves."""
Sum = tuple[Product, ...]

_MOST_NUMBERS = 8
_MOST_FACTORS, _IN_SUMS = 3, 2
_NAMED = (math.log(2), math.log(10), math.sqrt(2), math.sqrt(math.pi))
"""Numbers that other functions introduce: powers of two in place of powers of e."""
_NEAR = 1e-15
"""A few units in the last place of the double precision that Python computes in."""
_LARGEST_POWER = 64
_OF_POWERS = _LARGEST_POWER * 2.0**-53
"""The additional error of a power that was computed as a product, step by step."""
_MOST_CANCELLED = 64.0
_USUAL = (1e-30, 1e30)


def folded_numbers(field: Field, before: fx.Graph, after: fx.Graph) -> dict[float, Sum]:
    """Find what numbers of a graph were computed from.

    Args:
        field: any, to look up numbers in.
        before: a graph.
        after: what was made of it.

    Returns:
        For numbers of the second that mean nothing by themselves, sums of products of numbers of the first,
        if any.
    """
    known = _numbers(before.nodes)
    unknown = {n for n in _numbers(after.nodes) - known if -n not in known and not means_something(field, n)}
    basis = basis_of(before, after) if unknown else ()
    found: dict[float, Sum] = {}
    for candidates, reach in ((_products, _NEAR), (_with_powers, _NEAR + _OF_POWERS)):
        for number in (unknown - found.keys()) if basis else ():
            made_of = candidates(basis).near(number, reach)
            found |= {} if made_of is None else {number: made_of}
    return found


def basis_of(before: fx.Graph, after: fx.Graph) -> tuple[float, ...]:
    """The numbers of calls that a rewrite removed or changed, to compute others from; none if too many."""
    kept = {_told(node) for node in after.nodes}
    found = _numbers(node for node in before.nodes if _told(node) not in kept)
    usual = sorted(n for n in found if n not in (0.0, 1.0, -1.0) and _USUAL[0] < abs(n) < _USUAL[1])
    return () if len(usual) > _MOST_NUMBERS else tuple(usual)


def powers_of(number: float) -> Candidates:
    """Return the integer powers of one number."""
    return Candidates([((number, k),) for k in range(-_LARGEST_POWER, _LARGEST_POWER + 1)], 0)


def residues_of_sum(field: Field, products: Sum) -> tuple[int, ...]:
    """Return the residues of a sum of products, one per level."""
    primes = field.primes
    total = [0] * len(primes)
    for product in products:
        term = [1] * len(primes)
        for number, power in product:
            residues: Sequence[int] = residues_of_number(field, float, number)
            residues = residues if power > 0 else inverses(residues, primes)
            if power % 1:  # the same root that the field takes
                residues = [pow(r, (p + 1) // 4, p) for r, p in zip(residues, primes, strict=True)]
                power *= 2
            whole = abs(int(power))
            term = [t * pow(r, whole, p) % p for t, r, p in zip(term, residues, primes, strict=True)]
        total = [(a + t) % p for a, t, p in zip(total, term, primes, strict=True)]
    return tuple(total)


def value_of_sum(products: Sum) -> float:
    """Evaluate a sum of products in double precision."""
    return sum(math.prod(np.float64(number) ** power for number, power in product) for product in products)


class Candidates:
    """Products that a number may be, the simplest first, and sums and differences of two of them.

    Args:
        products: all of them.
        in_sums: how many of the first ones are added to others.
    """

    def __init__(self, products: Sequence[Product], in_sums: int) -> None:
        with np.errstate(over="ignore"):
            values = np.array([value_of_sum((one,)) for one in products])
        self._products, self._negative = products, values < 0
        self._added = np.abs(values[:in_sums])
        self._order = np.argsort(np.abs(values), kind="stable")
        self._sizes = np.abs(values)[self._order]

    def near(self, number: float, reach: float) -> Sum | None:
        """Return the first candidate within ``reach`` of a number, relative to it and to what is added.

        Args:
            number: the number to look up.
            reach: the tolerance.
        """
        added = np.flatnonzero(self._added <= _MOST_CANCELLED * abs(number))
        sizes = np.concatenate([[0.0], self._added[added], -self._added[added]])
        rest = number - sizes
        far = reach * (abs(number) + np.abs(sizes))
        low = np.searchsorted(self._sizes, np.abs(rest) - far, "left")
        high = np.searchsorted(self._sizes, np.abs(rest) + far, "right")
        for at in np.flatnonzero((high > low) & (np.abs(rest) > far))[:1]:
            other = self._signed(int(self._order[low[at] : high[at]].min()), rest[at] < 0)
            return (self._signed(int(added[(at - 1) % len(added)]), sizes[at] < 0), other) if at else (other,)
        return None

    def _signed(self, at: int, negative: bool) -> Product:
        """A product or its negative, whichever has the wanted sign."""
        product = self._products[at]
        return product if negative == self._negative[at] else ((-1.0, 1), *product)


@functools.lru_cache(maxsize=64)
def _products(basis: tuple[float, ...]) -> Candidates:
    return Candidates(*_products_of(_factors(basis), _MOST_FACTORS))


@functools.lru_cache(maxsize=64)
def _with_powers(basis: tuple[float, ...]) -> Candidates:
    """Products with roots and with rests of decays, and powers times one more factor.

    ``(1 - b**k) / (1 - b)`` is a sum of powers.
    """
    rests = [1 - n for n in basis if 0 < n < 1]
    factors = _factors((*basis, *rests)) + [(n, power) for n in basis if n > 0 for power in (0.5, -0.5)]
    products, few = _products_of(factors, _MOST_FACTORS)
    powers = [
        (one, *other)
        for one in _powers(basis)
        for other in products[: len(factors) + 1]
        if not other or other[0][0] != one[0]
    ]
    return Candidates([*products, *powers], few)


@functools.lru_cache(maxsize=64)
def few_candidates(basis: tuple[float, ...]) -> Candidates:
    """So few that a float32 number is hardly ever one of them by chance."""
    products, _ = _products_of(_factors(basis), _IN_SUMS)
    return Candidates([*products, *((one,) for one in _powers(basis))], 1)


def _factors(basis: tuple[float, ...]) -> list[tuple[float, float]]:
    numbers = (*basis, *(n for n in _NAMED if n not in basis))
    return [(number, power) for number in numbers for power in (1, -1)]


def _powers(basis: tuple[float, ...]) -> list[tuple[float, float]]:
    return [(n, sign * k) for k in range(2, _LARGEST_POWER + 1) for n in basis for sign in (1, -1)]


def _products_of(factors: Sequence[tuple[float, float]], most: int) -> tuple[list[Product], int]:
    """Products of up to ``most`` factors, short ones first, and how many may be added to others."""
    found: list[Product] = [
        product
        for count in range(most + 1)
        for product in itertools.combinations_with_replacement(factors, count)
        if not any((number, -power) in product for number, power in product)
    ]
    return found, sum(len(product) <= _IN_SUMS for product in found)


def _told(node: fx.Node) -> tuple[Any, ...]:
    return node.name, node.target, str(node.args), str(node.kwargs)


def _numbers(nodes: Iterable[fx.Node]) -> set[float]:
    """The numbers among the arguments of calls, before PyTorch rounded them.

    Integers count only in pointwise calls; others are sizes.
    """
    found: set[float] = set()
    for node in nodes:
        kinds = (int, float) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else (float,)

        def note(value: Any, kinds: Any = kinds) -> Any:
            if type(value) in kinds and math.isfinite(value):
                found.add(unrounded(float(value)))
            return value

        if node.op == "call_function":
            fx.node.map_aggregate((node.args, node.kwargs), note)
    return found
