"""Prove that conditions hold for every size in a range: size by size,
or by remainders if the range is unbounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy

from fake.seam import symbolic_shapes as _t

_MAX_SIZES = 4096
_MAX_REMAINDERS = 64


def holds_for_all(condition: sympy.Basic, lower: int, upper: int | None, step: int = 1) -> bool:
    """Return whether a condition on one size is known to hold for every promised size.

    Args:
        condition: a relation with one symbol.
        lower: the least size.
        upper: the largest size; None for no limit.
        step: a number that divides all sizes.
    """
    (symbol,) = condition.free_symbols
    first = -(-lower // step) * step
    if upper is not None and (upper - first) // step < _MAX_SIZES:
        sizes = map(sympy.Integer, range(first, upper + 1, step))
        return all(condition.xreplace({symbol: size}) == sympy.true for size in sizes)
    return _is_constant_quotient(condition, symbol, first, step)


def _is_constant_quotient(condition: sympy.Basic, symbol: sympy.Symbol, lower: int, step: int) -> bool:
    """Return whether ``a // b == q`` holds from some size on,
    with ``a`` and ``b`` sums of the size and its quotients.

    For sizes with equal remainders both are linear. So ``q * b <= a`` and ``a < (q + 1) * b`` hold for all of
    them if they hold for the first size and their margins do not shrink at the next one.
    """
    if not isinstance(condition, sympy.Eq):
        return False
    quotient, number = condition.args if condition.args[1].is_Integer else condition.args[::-1]
    if not isinstance(quotient, _t.FloorDiv) or not number.is_Integer:
        return False
    dividend, divisor = quotient.args
    period = math.lcm(step, *(_period(part, symbol) for part in (dividend, divisor)))
    if not 0 < period <= _MAX_REMAINDERS * step:
        return False

    def is_nonnegative(value: Callable[[int], int]) -> bool:
        return all(0 <= value(size) <= value(size + period) for size in range(lower, lower + period, step))

    def value_of(part: sympy.Basic) -> Callable[[int], int]:
        return lambda size: int(part.xreplace({symbol: sympy.Integer(size)}))

    a, b, q = value_of(dividend), value_of(divisor), int(number)
    return (
        is_nonnegative(lambda size: b(size) - 1)
        and is_nonnegative(lambda size: a(size) - q * b(size))
        and is_nonnegative(lambda size: (q + 1) * b(size) - a(size) - 1)
    )


def _period(part: sympy.Basic, symbol: sympy.Symbol) -> int:
    """Return the number of remainders for each of which an expression is linear in a size; 0 if unknown."""
    if part == symbol or part.is_Integer:
        return 1
    if isinstance(part, sympy.Add):
        return math.lcm(*(_period(term, symbol) for term in part.args))
    if isinstance(part, sympy.Mul):
        numbers = [factor for factor in part.args if factor.is_Integer]
        others = [factor for factor in part.args if not factor.is_Integer]
        return _period(others[0], symbol) if len(others) == 1 and len(numbers) == 1 else 0
    if isinstance(part, _t.FloorDiv) and part.args[1].is_Integer and part.args[1] > 0:
        return _period(part.args[0], symbol) * int(part.args[1])
    return 0
