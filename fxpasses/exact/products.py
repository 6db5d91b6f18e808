"""Products in place of exponentials of sums of logarithms, whose residues do not know a sign.

Products are taken over dimensions, along one, and of powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fxpasses.exact.dual import Dual

_MAX_POWER = 64


class MultiplicativeArithmetic(Protocol):
    """What is used of the arithmetic."""

    def mul(self, a: Dual, b: Dual) -> Dual:
        """A product."""

    def exp(self, a: Dual) -> Dual:
        """An exponential."""

    def integer_power(self, a: Dual, exponent: int) -> Dual:
        """A power."""

    def full(self, size: Sequence[int], value: float, dtype: torch.dtype) -> Dual:
        """A tensor of one number. Args: its shape, the number, and its dtype."""


def product_over(m: MultiplicativeArithmetic, a: Dual, dim: Sequence[int], keepdim: bool = False) -> Dual:
    """Multiply the elements over dimensions, halving their number in each step.

    Args:
        m: the arithmetic.
        a: a tensor.
        dim: the dimensions.
        keepdim: whether they are kept, with size 1.

    Returns:
        The products; ones if there is no element.
    """
    over = sorted({d % a.dim() for d in dim})
    rest = [d for d in range(a.dim()) if d not in over]
    outer, count = [a.shape[d] for d in rest], math.prod(a.shape[d] for d in over)
    size = [1 if d in over else n for d, n in enumerate(a.shape)] if keepdim else outer
    if not count:
        return m.full(size, 1, a.dtype)  # type: ignore[arg-type]
    rows = a.map(lambda t: t.permute([*over, *rest]).reshape([count, *outer]))
    while count > 1:
        half = count // 2
        products = m.mul(_slice_rows(rows, 0, half), _slice_rows(rows, half, 2 * half))
        if count % 2:  # multiply the last one into the first
            first = m.mul(_slice_rows(products, 0, 1), _slice_rows(rows, count - 1, count))
            products = _concat(first, _slice_rows(products, 1, half))
        rows, count = products, half
    return rows.map(lambda t: t.reshape(size))


def exponential_of_product(m: MultiplicativeArithmetic, a: Dual, b: Dual) -> Callable[[], Dual] | None:
    """Return how to compute ``exp(a * b)`` of a small integer and an operand made of a logarithm.

    Args:
        m: the arithmetic.
        a: an operand.
        b: the other one.

    Returns:
        ``None`` for other operands.
    """
    if b.exponential is None:
        a, b = b, a
    if b.exponential is None or a.witness.numel() != 1 or a.dim() > b.dim():
        return None
    number = float(a.witness)
    if not number.is_integer() or abs(number) > _MAX_POWER:
        return None
    return lambda: m.integer_power(m.exp(b), int(number))


def _slice_rows(a: Dual, start: int, end: int) -> Dual:
    return a.map(lambda t: t[start:end])


def _concat(a: Dual, b: Dual) -> Dual:
    witness, *residues = (torch.cat(pair) for pair in zip(a.parts(), b.parts(), strict=True))
    return Dual(witness, residues, a.dtype)
