"""Ranges of symbols among the minimal guards, and how inequalities tighten them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy

from fake.seam import symbolic_shapes as _t
from fake.symbols.implications import Facts


@dataclass(frozen=True)
class Range:
    """Bounds of a symbol's value.

    Attributes:
        symbol: the symbol.
        lower, upper: its least and greatest value; ``None`` is no bound.
        records: the guards that raised the lower bound, if any did.
    """

    symbol: sympy.Symbol
    lower: int | None
    upper: int | None
    records: tuple[Any, ...] = ()

    def bound(self, facts: Facts) -> None:
        facts.bound(self.symbol, self.lower, self.upper)

    def follows_from(self, facts: Facts) -> bool:
        return all(facts.implies(condition) for condition in self.conditions())

    def conditions(self) -> Iterator[sympy.Basic]:
        if self.lower is not None:
            yield sympy.Ge(self.symbol, self.lower, evaluate=False)
        if self.upper is not None:
            yield sympy.Le(self.symbol, self.upper, evaluate=False)


def tightened_ranges(relations: dict[sympy.Basic, Any], ranges: list[Range]) -> list[Range]:
    """Tighten ranges by ``!=`` conditions at their ends, and remove those conditions.

    ``4 <= s`` and ``s // 4 != 1`` become ``8 <= s``.
    """
    bounds = {r.symbol: r for r in ranges}
    found = True
    while found:
        found = False
        for condition in [c for c in relations if isinstance(c, sympy.Ne)]:
            symbol, divisor, value = _unequal(condition)
            least = bounds[symbol].lower if symbol in bounds else None
            if least is None or _least_multiple(relations, symbol, least) // divisor != value:
                continue
            lower = _least_multiple(relations, symbol, (value + 1) * divisor)
            record = relations.pop(condition)
            bounds[symbol] = replace(bounds[symbol], lower=lower, records=(*bounds[symbol].records, record))
            found = True
    return list(bounds.values())


def _unequal(condition: sympy.Ne) -> tuple[sympy.Basic, int, int]:
    """Return ``s // k != value`` as ``(s, k, value)``; for other conditions a symbol without a range."""
    left, right = condition.args if condition.args[1].is_Integer else reversed(condition.args)
    if not isinstance(right, sympy.Integer):
        return sympy.S.NaN, 1, 0
    if isinstance(left, _t.FloorDiv) and isinstance(left.args[1], sympy.Integer) and left.args[1] > 0:
        return left.args[0], int(left.args[1]), int(right)
    return left, 1, int(right)


def _least_multiple(relations: Iterable[sympy.Basic], symbol: sympy.Basic, least: int) -> int:
    """Return the least value of a symbol from ``least`` on, given a condition that states a divisor."""
    for condition in relations:
        match condition:
            case sympy.Eq(args=((_t.Mod() | _t.PythonMod()) as remainder, sympy.Integer(p=0))):
                base, divisor = remainder.args
                if base == symbol and isinstance(divisor, sympy.Integer) and divisor > 0:
                    least = -(-least // int(divisor)) * int(divisor)
    return least


def drop_implied_by_values(relations: dict[sympy.Basic, Any]) -> dict[sympy.Basic, Any]:
    """Move numbers to the right, and drop conditions that hold because others fix the value of a symbol.

    >>> s = sympy.Symbol("s", integer=True)
    >>> drop_implied_by_values({sympy.Eq(8, s, evaluate=False): "first", sympy.Eq(_t.Mod(3 * s + 24, s), 0): "second"})
    {Eq(s, 8): 'first'}
    """
    normalized = {_number_on_right(condition): record for condition, record in relations.items()}
    values = {
        condition.lhs: condition.rhs
        for condition in normalized
        if isinstance(condition, sympy.Eq) and condition.lhs.is_Symbol and condition.rhs.is_Integer
    }
    return {
        condition: record
        for condition, record in normalized.items()
        if condition.args in values.items() or not _holds(condition, values)
    }


def _holds(condition: sympy.Basic, values: dict[sympy.Basic, sympy.Basic]) -> bool:
    if condition.free_symbols.isdisjoint(values):
        return False
    try:
        return condition.xreplace(values) == sympy.true
    except ZeroDivisionError:  # such a condition was never asked
        return False


def _number_on_right(condition: sympy.Basic) -> sympy.Basic:
    if isinstance(condition, sympy.core.relational.Relational) and condition.lhs.is_number:
        return condition.reversed
    return condition
