"""Residues of the number that a float in a graph stands for: a fraction, a power of e or two, pi, or a root.

Graphs hold ``0.1`` and mean one tenth, ``0.6931471805599453`` and mean log 2. Read as exact dyadic fractions,
``0.9 + 0.1`` would not be 1, and ``exp2(x)`` not ``exp(x * log 2)``. Numbers that differ by less than an ulp
may be taken for the same one; a check of rounding complements the exact one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fxpasses.exact.fields import Field, inverses

_SIMPLE = 1 << 14
_DIGITS = 13
_NEAR = 4.5e-16
_SMALL_MULTIPLE = 64
_LARGEST = 1e38
_BITS, _SPARE_BITS = 24, 6
"""Of the mantissa of float32; a decimal that was rounded to it hardly ever ends in so many zeros."""
_SHORT = 7
_NAMED = (math.pi, math.log(2), 1 / math.log(2), math.log(10), 1 / math.log(10), math.sqrt(2 / math.pi))
_SMALL_SQUARE = 4096
"""The largest denominator of a fraction whose root, or root of a root, a number may be."""


def residues_of_number(field: Field, kind: Hashable, number: float | int) -> tuple[int, ...]:
    """Return one residue per level.

    Args:
        field: the field.
        kind: the type of the number; otherwise ``1`` and ``True`` would be equal keys.
        number: the number. A non-finite one gives 0.
    """
    return _of_meaning(field, kind, number) or tuple(_of_fraction(Fraction(number), p) for p in field.primes)


def means_something(field: Field, number: float) -> bool:
    """Whether a number means more than its exact binary fraction: a decimal, a root, a logarithm."""
    return _of_meaning(field, float, number) is not None


@functools.lru_cache(maxsize=1 << 16)
def _of_meaning(field: Field, kind: Hashable, number: float | int) -> tuple[int, ...] | None:
    primes = field.primes
    if kind in (bool, int):
        return tuple(int(number) % p for p in primes)
    if not math.isfinite(number):
        return (0,) * len(primes)
    fraction = _fraction_meant(number)
    if fraction is not None:
        return tuple(_of_fraction(fraction, p) for p in primes)
    for value, residues in _known(field):
        multiple = Fraction(number / value).limit_denominator(_SMALL_MULTIPLE)
        if multiple and _is_near(float(multiple) * value, number):
            return tuple(_of_fraction(multiple, p) * r % p for r, p in zip(residues, primes, strict=True))
    for times in (1, 2):  # attention scales queries and keys by the fourth root of their size
        power = Fraction(number**2**times).limit_denominator(_SMALL_SQUARE)
        if power and _is_near(float(power) ** 0.5**times, abs(number)):
            sign = 1 if number > 0 else -1
            return tuple(sign * pow(_of_fraction(power, p), ((p + 1) // 4) ** times, p) % p for p in primes)
    return None


def _fraction_meant(number: float) -> Fraction | None:
    if number == int(number) or not 1e-15 <= abs(number) <= 1e15:
        return Fraction(number)
    size, sign = abs(number), 1 if number > 0 else -1
    found = _short_fraction(size)
    if found is None and size < 1 and 1 - (1 - size) == size:  # for example 1 - 0.999, one minus a decay
        rest = _short_fraction(1 - size)
        found = None if rest is None else 1 - rest
    return None if found is None else sign * found


def _short_fraction(number: float) -> Fraction | None:
    simple = Fraction(number).limit_denominator(_SIMPLE)
    if float(simple) == number:
        return simple
    for digits in range(1, _DIGITS):  # 1e-06 is meant, not the nearest double
        decimal = Fraction(f"{number:.{digits}g}")
        if float(decimal) == number:
            return decimal
    return None


@functools.lru_cache(maxsize=1 << 16)
def unrounded(number: float) -> float:
    """A number of a graph as it was before PyTorch rounded it to float32.

    ``F.rms_norm`` adds 9.999999974752427e-07 for ``eps=1e-6``. Kernels of float32 and lower precision round
    every number so: both are the same to them.
    """
    narrow = np.float32(number) if abs(number) < _LARGEST else math.inf
    if not math.isfinite(number) or float(narrow) != number or number == int(number):
        return number
    digits = int(math.frexp(abs(number))[0] * (1 << _BITS))
    if not digits % (1 << _SPARE_BITS):  # a power of two, or a 16-bit float
        return number
    short = (float(f"{number:.{n}g}") for n in range(1, _SHORT))
    simple = float(Fraction(number).limit_denominator(_SMALL_MULTIPLE))
    root = math.copysign(math.sqrt(Fraction(number**2).limit_denominator(_SMALL_MULTIPLE)), number)
    return next((value for value in (simple, *short, root, *_NAMED) if np.float32(value) == narrow), number)


def number_held(value: Tensor) -> float | None:
    """The number that all elements of a tensor are, before rounding: a graph may be written with either."""
    first = float(value.flatten()[0]) if value.numel() else 0.0
    return unrounded(first) if first and bool((value == first).all()) else None


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= _NEAR * abs(b)


def _of_fraction(fraction: Fraction, prime: int) -> int:
    return fraction.numerator * pow(fraction.denominator % prime, prime - 2, prime) % prime


@functools.lru_cache(maxsize=8)
def _known(field: Field) -> tuple[tuple[float, list[int]], ...]:
    """Transcendental numbers with their residues. Logarithms agree with the field's, square roots with its roots."""
    primes = field.primes

    def product(a: list[int], b: list[int]) -> list[int]:
        return [x * y % p for x, y, p in zip(a, b, primes, strict=True)]

    def logarithm(n: int) -> list[int]:
        deeper = [int(field.log(k, torch.tensor([n]))[0]) for k in range(len(primes) - 1)]
        return [int(field.hash(0, "log", torch.tensor([n]))[0]), *deeper]

    root_of_two = [pow(2, (p + 1) // 4, p) for p in primes]
    root_of_pi = field.free
    pi = product(root_of_pi, root_of_pi)
    log_2, log_10 = logarithm(2), logarithm(10)
    return (
        (math.log(2), log_2),
        (1 / math.log(2), inverses(log_2, primes)),
        (math.log(10), log_10),
        (1 / math.log(10), inverses(log_10, primes)),
        (math.pi, pi),
        (1 / math.pi, inverses(pi, primes)),
        (math.sqrt(math.pi), root_of_pi),
        (1 / math.sqrt(math.pi), inverses(root_of_pi, primes)),
        (math.sqrt(2 / math.pi), product(root_of_two, inverses(root_of_pi, primes))),
        (math.sqrt(math.pi / 2), product(inverses(root_of_two, primes), root_of_pi)),
    )
