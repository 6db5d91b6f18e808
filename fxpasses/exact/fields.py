"""Chains of prime fields in which sums, products, quotients, exponentials and logarithms are exact.

A *level* is the field of integers modulo a prime. The primes of a chain satisfy ``p[k] = 2 * p[k+1] + 1`` (a
Cunningham chain of the second kind, of primes below 2**24), so that the squares of level ``k`` form a cyclic
group with ``p[k+1]`` elements:

* ``exp`` maps an element of level ``k+1`` to level ``k``: ``g[k] ** x``. Then ``exp(a + b) = exp(a) *
  exp(b)``.
* ``log`` maps an element of level ``k`` to level ``k+1``, by a table of discrete logarithms. Then ``log(a *
  b) = log(a) + log(b)`` and ``log(exp(x)) = x``.

In the last level ``exp`` is a hash, and in the first one ``log``: equal arguments give equal results, and no
other law holds.

Checking tensor programs in fields is the idea of Mirage (arXiv 2405.05751), which has two levels and one
exponential on each path. A chain makes nested exponentials exact, too.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_CHAINS = ((16362719, 8181359, 4090679, 2045339), (16295519, 8147759, 4073879, 2036939))
LEVELS = 3
"""The number of levels of a value."""

_MAX_WITHOUT_TABLE = 1 << 15
"""So many logarithms are computed without the full table, which takes 64 MB and a third of a second."""
_BABY_STEPS = 1 << 18
_LOWEST_EXPONENT = -1140
_HIGHEST_EXPONENT = 1030


class Field:
    """Arithmetic in the levels of one chain. Residues are int64 tensors with elements in ``[0, p)``.

    Args:
        number: which chain.

    Attributes:
        primes: one prime per level.
        generators: for each level but the last, a generator of its squares.
    """

    def __init__(self, number: int) -> None:
        self.primes = _CHAINS[number % len(_CHAINS)][:LEVELS]
        self._salt = number * 7919 + 13
        rng = random.Random(number)
        self.generators = [pow(rng.randrange(2, p - 1), 2, p) for p in self.primes[:-1]]
        self.random_elements = [rng.randrange(2, p) for p in self.primes]
        """A random element of each level, for a number that no law ties to others (the square root of pi)."""
        self._powers_of_two = [
            torch.tensor([pow(2, e % (p - 1), p) for e in range(_LOWEST_EXPONENT, _HIGHEST_EXPONENT)])
            for p in self.primes
        ]
        self._low_powers, self._high_powers = [], []
        for g, p in zip(self.generators, self.primes, strict=False):
            self._low_powers.append(_power_table(g, 4096, p))
            self._high_powers.append(_power_table(pow(g, 4096, p), 4096, p))
        self._log_tables: dict[int, Tensor] = {}
        self._baby_steps: dict[int, tuple[Tensor, Tensor]] = {}

    def power(self, level: int, base: Tensor, exponent: int) -> Tensor:
        """Compute ``base ** exponent`` modulo the prime of a level.

        Args:
            level: index of the prime.
            base: residues, ``int64``.
            exponent: an integer. A negative one inverts (zero stays zero).
        """
        p = self.primes[level]
        exponent %= p - 1
        result = torch.ones_like(base)
        while exponent:
            if exponent & 1:
                result = result * base % p
            exponent >>= 1
            if exponent:
                base = base * base % p
        return result

    def inverse(self, level: int, value: Tensor) -> Tensor:
        """``1 / value`` in a level. The inverse of zero is zero."""
        return self.power(level, value, self.primes[level] - 2)

    def sqrt(self, level: int, value: Tensor) -> Tensor:
        """A square root of ``value`` or of ``-value``, whichever is a square. Multiplicative."""
        return self.power(level, value, (self.primes[level] + 1) // 4)

    def exp(self, level: int, exponent: Tensor) -> Tensor:
        """The exponential in ``level`` of an element of level ``level + 1``."""
        low, high = self._low_powers[level], self._high_powers[level]
        return low[exponent & 4095] * high[exponent >> 12] % self.primes[level]

    def log(self, level: int, value: Tensor) -> Tensor:
        """The logarithm in level ``level + 1`` of an element of ``level``: the same for ``x`` and ``-x``."""
        p, q = self.primes[level], self.primes[level + 1]
        squared = value * value % p  # the generator only generates squares
        half = (q + 1) // 2
        if level not in self._log_tables and value.numel() <= _MAX_WITHOUT_TABLE:
            return self._logs_without_table(level, squared) * half % q
        if level not in self._log_tables:
            powers = torch.ones(1, dtype=torch.int64)
            while len(powers) < q:
                powers = torch.cat([powers, powers * pow(self.generators[level], len(powers), p) % p])
            table = torch.zeros(p, dtype=torch.int32)
            table[powers[:q]] = torch.arange(q, dtype=torch.int32)
            self._log_tables[level] = table
        return self._log_tables[level][squared].long() * half % q

    def _logs_without_table(self, level: int, squares: Tensor) -> Tensor:
        """Compute the same without the table, by baby-step giant-step."""
        p, q, flat = self.primes[level], self.primes[level + 1], squares.flatten()
        if level not in self._baby_steps:
            low, high = self._low_powers[level], self._high_powers[level][: _BABY_STEPS // 4096]
            self._baby_steps[level] = (high[:, None] * low % p).flatten().sort()
        sorted_powers, order = self._baby_steps[level]
        found = torch.zeros_like(flat)
        giant_step = pow(self.generators[level], -_BABY_STEPS, p)
        for giant in range(-(-q // _BABY_STEPS)):
            at = torch.searchsorted(sorted_powers, flat).clamp(max=_BABY_STEPS - 1)
            found = torch.where(sorted_powers[at] == flat, giant * _BABY_STEPS + order[at], found)
            flat = flat * giant_step % p
        return found.view(squares.shape) % q

    def hash(self, level: int, name: str, value: Tensor) -> Tensor:
        """Apply an uninterpreted function to each element.

        Equal elements give equal results, others almost surely different ones.

        Args:
            level: index of the prime.
            name: of the function; another name is another function.
            value: residues or other integers, ``int64``.
        """
        mixed = value * 0x5851F42D4C957F2D + (
            zlib.crc32(name.encode()) * 2654435761 + self._salt * 40503 + level
        )
        for factor in (0x2127599BF4325C37, 0x1B03738712FAD5C9):
            mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * factor
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
        return mixed % self.primes[level]

    def encode(self, values: Tensor) -> list[Tensor]:
        """Return residues of integers, or of floats as exact dyadic fractions (0 if they are not finite)."""
        if not values.is_floating_point():
            integers = values.long()
            return [integers % p for p in self.primes]
        mantissa, exponent = torch.frexp(torch.nan_to_num(values.double(), 0.0, 0.0, 0.0))
        digits = (mantissa * 2.0**53).long()
        index = exponent.long() - 53 - _LOWEST_EXPONENT
        return [
            digits % p * table[index.clamp(0, len(table) - 1)] % p
            for p, table in zip(self.primes, self._powers_of_two, strict=True)
        ]

    def bilinear(self, level: int, function: object, left: Tensor, right: Tensor) -> Tensor:
        """Apply a bilinear function such as a matmul modulo the prime of a level.

        The left factor is split into two halves of 12 bits: sums of up to 2**17 products are exact in
        float64.

        Args:
            level: index of the prime.
            function: takes two float64 tensors and is linear in both.
            left: residues, ``int64``.
            right: residues, ``int64``.
        """
        p = self.primes[level]
        other = right.double()
        high = function((left >> 12).double(), other).long() % p  # type: ignore[operator]
        low = function((left & 4095).double(), other).long() % p  # type: ignore[operator]
        return (high * 4096 + low) % p

    def lu_factor(self, level: int, matrix: Tensor) -> Tensor:
        """Compute the LU factors of matrices, both packed into one, without reordering rows.

        Args:
            level: index of the prime.
            matrix: residues of square matrices.
        """
        p, factors = self.primes[level], matrix.clone()
        for k in range(factors.shape[-1]):
            multipliers = (
                factors[..., k + 1 :, k : k + 1] * self.inverse(level, factors[..., k : k + 1, k : k + 1]) % p
            )
            factors[..., k + 1 :, k : k + 1] = multipliers
            rest = factors[..., k + 1 :, k + 1 :]
            factors[..., k + 1 :, k + 1 :] = (rest - multipliers * factors[..., k : k + 1, k + 1 :]) % p
        return factors

    def solve(self, level: int, matrix: Tensor, right: Tensor) -> Tensor:
        """Solve linear equations. The result is arbitrary if there is no unique one.

        Args:
            level: index of the prime.
            matrix: residues of square matrices.
            right: residues of as many right-hand sides.
        """
        p, augmented = self.primes[level], torch.cat([matrix, right], -1)
        for k in range(matrix.shape[-1]):
            pivot = (augmented[..., k:, k] != 0).byte().argmax(-1, keepdim=True).unsqueeze(-1) + k
            at = pivot.expand(*pivot.shape[:-1], augmented.shape[-1])
            row, moved = augmented.gather(-2, at), augmented[..., k : k + 1, :].clone()
            augmented = augmented.scatter(-2, at, moved)
            row = row * self.inverse(level, row[..., k : k + 1]) % p
            augmented = (augmented - augmented[..., k : k + 1] * row) % p
            augmented[..., k : k + 1, :] = row
        return augmented[..., matrix.shape[-1] :]


@functools.cache
def field(number: int) -> Field:
    """Return the field of a chain. Its tables are shared by all samples."""
    return Field(number % len(_CHAINS))


def _power_table(base: int, count: int, prime: int) -> Tensor:
    values: list[int] = [1]
    for _ in range(count - 1):
        values.append(values[-1] * base % prime)
    return torch.tensor(values)


def inverses(values: Sequence[int], primes: Sequence[int]) -> list[int]:
    """Return the inverses of one element of each level."""
    return [pow(v, p - 2, p) for v, p in zip(values, primes, strict=True)]
