"""Numbers that a rewrite computed from others: ``(x / 255 - 0.485) / 0.229`` is ``x * 0.01712... - 2.1179...``.

A number of the graph after that means nothing by itself is looked for among products of the numbers of the graph before, and sums of two of
these. It has the residues of what it was computed from. Of two hundred thousand candidates one is as near as that by chance once in 1e9 times.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from torch import fx

from fxpasses.exact.fields import Field, inverses
from fxpasses.exact.float_constants import means_something, residues_of_number, unrounded

Product = tuple[tuple[float, int], ...]
"""Numbers with their exponents, 1 or -1."""

_MOST_NUMBERS = 8
_MOST_FACTORS, _IN_SUMS = 3, 2
_NAMED = (math.log(2), math.log(10), math.sqrt(2), math.sqrt(math.pi))
"""Numbers that come with other functions: powers of two for those of e."""
_NEAR = 1e-15
"""A few units in the last place of the double precision that Python computes in."""
_USUAL = (1e-30, 1e30)


def folded_numbers(field: Field, before: fx.Graph, after: fx.Graph) -> dict[float, tuple[Product, ...]]:
    """What numbers of a graph were computed from.

    Args:
        field: any, in which numbers are looked up.
        before: a graph.
        after: what was made of it.

    Returns:
        For numbers of the second that mean nothing by themselves, sums of products of numbers of the first, where there are such.
    """
    known = _numbers(before)
    unknown = {n for n in _numbers(after) - known if -n not in known and not means_something(field, n)}
    basis = sorted(n for n in known if n not in (0.0, 1.0, -1.0) and _USUAL[0] < abs(n) < _USUAL[1])
    if not unknown or not basis or len(basis) > _MOST_NUMBERS:
        return {}
    basis += [n for n in _NAMED if n not in known]
    factors = [(number, power) for number in basis for power in (1, -1)]
    products: list[Product] = [
        found
        for count in range(1, _MOST_FACTORS + 1)
        for found in itertools.combinations_with_replacement(factors, count)
        if not any((number, -power) in found for number, power in found)
    ]
    values = np.array([math.prod(n**power for n, power in one) for one in products])
    few = sum(len(one) <= _IN_SUMS for one in products)  # the first ones
    sums = values[:few, None] + values[None, :few]
    found: dict[float, tuple[Product, ...]] = {}
    for number, sign in itertools.product(unknown, (1, -1)):
        near = _NEAR * abs(number)
        at: list[Any] = [[i] for i in np.flatnonzero(np.abs(values - sign * number) <= near)]
        at += np.argwhere(np.abs(sums - sign * number) <= near).tolist()
        if at:
            found[number] = tuple(((float(sign), 1), *products[i]) for i in at[0])
    return found


def residues_of_sum(field: Field, products: tuple[Product, ...]) -> tuple[int, ...]:
    """The residues of a sum of products, one a level."""
    primes = field.primes
    total = [0] * len(primes)
    for product in products:
        term = [1] * len(primes)
        for number, power in product:
            residues = residues_of_number(field, float, number)
            factors = residues if power == 1 else inverses(residues, primes)
            term = [t * f % p for t, f, p in zip(term, factors, primes, strict=True)]
        total = [(a + t) % p for a, t, p in zip(total, term, primes, strict=True)]
    return tuple(total)


def _numbers(graph: fx.Graph) -> set[float]:
    """The numbers among the arguments of calls, as they were before torch rounded them."""
    found: set[float] = set()

    def note(value: Any) -> Any:
        if type(value) in (int, float) and math.isfinite(value):
            found.add(unrounded(float(value)))
        return value

    for node in graph.nodes:
        if node.op == "call_function":
            fx.node.map_aggregate((node.args, node.kwargs), note)
    return found
