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

_MAX_DENOMINATOR = 1 << 14
_DIGITS = 13
_TOLERANCE = 4.5e-16
_MAX_SMALL_DENOMINATOR = 64
_FLOAT32_LIMIT = 1e38
_MANTISSA_BITS, _TRAILING_ZERO_BITS = 24, 6
"""Of the mantissa of float32; a decimal that was rounded to it hardly ever ends in so many zeros."""
_SHORT_DIGITS = 7
_KNOWN_CONSTANTS = (
    math.pi,
    math.log(2),
    1 / math.log(2),
    math.log(10),
    1 / math.log(10),
    math.sqrt(2 / math.pi),
)
_MAX_RADICAND_DENOMINATOR = 4096
"""The largest denominator of a fraction whose root, or root of a root, a number may be."""


def residues_of_number(field: Field, kind: Hashable, number: float | int) -> tuple[int, ...]:
    """Return one residue per level.

    Args:
        field: the field.
        kind: the type of the number; otherwise ``1`` and ``True`` would be equal keys.
        number: the number. A non-finite one gives 0.
    """
    return _residues_of_meaning(field, kind, number) or tuple(
        _fraction_modulo(Fraction(number), p) for p in field.primes
    )


def has_known_meaning(field: Field, number: float) -> bool:
    """Whether a number means more than its exact binary fraction: a decimal, a root, a logarithm."""
    return _residues_of_meaning(field, float, number) is not None


@functools.lru_cache(maxsize=1 << 16)
def _residues_of_meaning(field: Field, kind: Hashable, number: float | int) -> tuple[int, ...] | None:
    primes = field.primes
    if kind in (bool, int):
        return tuple(int(number) % p for p in primes)
    if not math.isfinite(number):
        return (0,) * len(primes)
    fraction = _intended_fraction(number)
    if fraction is not None:
        return tuple(_fraction_modulo(fraction, p) for p in primes)
    for value, residues in _known_irrationals(field):
        multiple = Fraction(number / value).limit_denominator(_MAX_SMALL_DENOMINATOR)
        if multiple and _is_close(float(multiple) * value, number):
            return tuple(_fraction_modulo(multiple, p) * r % p for r, p in zip(residues, primes, strict=True))
    for times in (1, 2):  # attention scales queries and keys by the fourth root of their size
        power = Fraction(number**2**times).limit_denominator(_MAX_RADICAND_DENOMINATOR)
        if power and _is_close(float(power) ** 0.5**times, abs(number)):
            sign = 1 if number > 0 else -1
            return tuple(
                sign * pow(_fraction_modulo(power, p), ((p + 1) // 4) ** times, p) % p for p in primes
            )
    return None


def _intended_fraction(number: float) -> Fraction | None:
    if number == int(number) or not 1e-15 <= abs(number) <= 1e15:
        return Fraction(number)
    magnitude, sign = abs(number), 1 if number > 0 else -1
    found = _short_fraction(magnitude)
    if (
        found is None and magnitude < 1 and 1 - (1 - magnitude) == magnitude
    ):  # for example 1 - 0.999, one minus a decay
        rest = _short_fraction(1 - magnitude)
        found = None if rest is None else 1 - rest
    return None if found is None else sign * found


def _short_fraction(number: float) -> Fraction | None:
    simple = Fraction(number).limit_denominator(_MAX_DENOMINATOR)
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
    rounded = np.float32(number) if abs(number) < _FLOAT32_LIMIT else math.inf
    if not math.isfinite(number) or float(rounded) != number or number == int(number):
        return number
    digits = int(math.frexp(abs(number))[0] * (1 << _MANTISSA_BITS))
    if not digits % (1 << _TRAILING_ZERO_BITS):  # a power of two, or a 16-bit float
        return number
    short = (float(f"{number:.{n}g}") for n in range(1, _SHORT_DIGITS))
    simple = float(Fraction(number).limit_denominator(_MAX_SMALL_DENOMINATOR))
    root = math.copysign(math.sqrt(Fraction(number**2).limit_denominator(_MAX_SMALL_DENOMINATOR)), number)
    return next(
        (value for value in (simple, *short, root, *_KNOWN_CONSTANTS) if np.float32(value) == rounded), number
    )


def uniform_value(value: Tensor) -> float | None:
    """The number that all elements of a tensor are, before rounding: a graph may be written with either."""
    first = float(value.flatten()[0]) if value.numel() else 0.0
    return unrounded(first) if first and bool((value == first).all()) else None


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * abs(b)


def _fraction_modulo(fraction: Fraction, prime: int) -> int:
    return fraction.numerator * pow(fraction.denominator % prime, prime - 2, prime) % prime


@functools.lru_cache(maxsize=8)
def _known_irrationals(field: Field) -> tuple[tuple[float, list[int]], ...]:
    """Transcendental numbers with their residues. Logarithms agree with the field's, square roots with its roots."""
    primes = field.primes

    def product(a: list[int], b: list[int]) -> list[int]:
        return [x * y % p for x, y, p in zip(a, b, primes, strict=True)]

    def logarithm(n: int) -> list[int]:
        deeper = [int(field.log(k, torch.tensor([n]))[0]) for k in range(len(primes) - 1)]
        return [int(field.hash(0, "log", torch.tensor([n]))[0]), *deeper]

    root_of_two = [pow(2, (p + 1) // 4, p) for p in primes]
    root_of_pi = field.random_elements
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
