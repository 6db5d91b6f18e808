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
from fxpasses.exact.float_constants import has_known_meaning, residues_of_number, unrounded

Product = tuple[tuple[float, float], ...]
"""Numbers with their exponents, which are integers or halves."""
Sum = tuple[Product, ...]

_MAX_NUMBERS = 8
_MAX_FACTORS, _MAX_FACTORS_IN_SUMS = 3, 2
_KNOWN_CONSTANTS = (math.log(2), math.log(10), math.sqrt(2), math.sqrt(math.pi))
"""Numbers that other functions introduce: powers of two in place of powers of e."""
_TOLERANCE = 1e-15
"""A few units in the last place of the double precision that Python computes in."""
_MAX_POWER = 64
_POWER_TOLERANCE = _MAX_POWER * 2.0**-53
"""The additional error of a power that was computed as a product, step by step."""
_MAX_CANCELLATION = 64.0
_USABLE_RANGE = (1e-30, 1e30)


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
    known = _numbers_in_calls(before.nodes)
    unknown = {
        n
        for n in _numbers_in_calls(after.nodes) - known
        if -n not in known and not has_known_meaning(field, n)
    }
    basis = basis_of(before, after) if unknown else ()
    found: dict[float, Sum] = {}
    for candidates, tolerance in (
        (_product_candidates, _TOLERANCE),
        (_power_candidates, _TOLERANCE + _POWER_TOLERANCE),
    ):
        for number in (unknown - found.keys()) if basis else ():
            made_of = candidates(basis).find_near(number, tolerance)
            found |= {} if made_of is None else {number: made_of}
    return found


def basis_of(before: fx.Graph, after: fx.Graph) -> tuple[float, ...]:
    """The numbers of calls that a rewrite removed or changed, to compute others from; none if too many."""
    unchanged = {_call_key(node) for node in after.nodes}
    found = _numbers_in_calls(node for node in before.nodes if _call_key(node) not in unchanged)
    usable = sorted(
        n for n in found if n not in (0.0, 1.0, -1.0) and _USABLE_RANGE[0] < abs(n) < _USABLE_RANGE[1]
    )
    return () if len(usable) > _MAX_NUMBERS else tuple(usable)


def powers_of(number: float) -> Candidates:
    """Return the integer powers of one number."""
    return Candidates([((number, k),) for k in range(-_MAX_POWER, _MAX_POWER + 1)], 0)


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
        self._products, self._is_negative = products, values < 0
        self._addend_sizes = np.abs(values[:in_sums])
        self._order = np.argsort(np.abs(values), kind="stable")
        self._sorted_sizes = np.abs(values)[self._order]

    def find_near(self, number: float, tolerance: float) -> Sum | None:
        """Return the first candidate within ``tolerance`` of a number, relative to it and to what is added.

        Args:
            number: the number to look up.
            tolerance: the tolerance.
        """
        addends = np.flatnonzero(self._addend_sizes <= _MAX_CANCELLATION * abs(number))
        sizes = np.concatenate([[0.0], self._addend_sizes[addends], -self._addend_sizes[addends]])
        rest = number - sizes
        tolerances = tolerance * (abs(number) + np.abs(sizes))
        low = np.searchsorted(self._sorted_sizes, np.abs(rest) - tolerances, "left")
        high = np.searchsorted(self._sorted_sizes, np.abs(rest) + tolerances, "right")
        for at in np.flatnonzero((high > low) & (np.abs(rest) > tolerances))[:1]:
            other = self._with_sign(int(self._order[low[at] : high[at]].min()), rest[at] < 0)
            return (
                (self._with_sign(int(addends[(at - 1) % len(addends)]), sizes[at] < 0), other)
                if at
                else (other,)
            )
        return None

    def _with_sign(self, at: int, negative: bool) -> Product:
        """A product or its negative, whichever has the wanted sign."""
        product = self._products[at]
        return product if negative == self._is_negative[at] else ((-1.0, 1), *product)


@functools.lru_cache(maxsize=64)
def _product_candidates(basis: tuple[float, ...]) -> Candidates:
    return Candidates(*_products_of_factors(_factors(basis), _MAX_FACTORS))


@functools.lru_cache(maxsize=64)
def _power_candidates(basis: tuple[float, ...]) -> Candidates:
    """Products with roots and with rests of decays, and powers times one more factor.

    ``(1 - b**k) / (1 - b)`` is a sum of powers.
    """
    complements = [1 - n for n in basis if 0 < n < 1]
    factors = _factors((*basis, *complements)) + [(n, power) for n in basis if n > 0 for power in (0.5, -0.5)]
    products, few = _products_of_factors(factors, _MAX_FACTORS)
    powers = [
        (one, *other)
        for one in _powers(basis)
        for other in products[: len(factors) + 1]
        if not other or other[0][0] != one[0]
    ]
    return Candidates([*products, *powers], few)


@functools.lru_cache(maxsize=64)
def simple_candidates(basis: tuple[float, ...]) -> Candidates:
    """So few that a float32 number is hardly ever one of them by chance."""
    products, _ = _products_of_factors(_factors(basis), _MAX_FACTORS_IN_SUMS)
    return Candidates([*products, *((one,) for one in _powers(basis))], 1)


def _factors(basis: tuple[float, ...]) -> list[tuple[float, float]]:
    numbers = (*basis, *(n for n in _KNOWN_CONSTANTS if n not in basis))
    return [(number, power) for number in numbers for power in (1, -1)]


def _powers(basis: tuple[float, ...]) -> list[tuple[float, float]]:
    return [(n, sign * k) for k in range(2, _MAX_POWER + 1) for n in basis for sign in (1, -1)]


def _products_of_factors(factors: Sequence[tuple[float, float]], most: int) -> tuple[list[Product], int]:
    """Products of up to ``most`` factors, short ones first, and how many may be added to others."""
    found: list[Product] = [
        product
        for count in range(most + 1)
        for product in itertools.combinations_with_replacement(factors, count)
        if not any((number, -power) in product for number, power in product)
    ]
    return found, sum(len(product) <= _MAX_FACTORS_IN_SUMS for product in found)


def _call_key(node: fx.Node) -> tuple[Any, ...]:
    return node.name, node.target, str(node.args), str(node.kwargs)


def _numbers_in_calls(nodes: Iterable[fx.Node]) -> set[float]:
    """The numbers among the arguments of calls, before PyTorch rounded them.

    Integers count only in pointwise calls; others are sizes.
    """
    found: set[float] = set()
    for node in nodes:
        kinds = (int, float) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else (float,)

        def collect(value: Any, kinds: Any = kinds) -> Any:
            if type(value) in kinds and math.isfinite(value):
                found.add(unrounded(float(value)))
            return value

        if node.op == "call_function":
            fx.node.map_aggregate((node.args, node.kwargs), collect)
    return found
