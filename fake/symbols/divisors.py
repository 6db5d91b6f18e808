"""Simplify conditions by known divisibility: ``s = k*t`` removes most of what reshapes ask.

A reshape of ``s`` rows by ``k`` asks for ``s % k == 0``, and everything after it is expressed in ``s // k``:
quotients of quotients, remainders of products. With ``k*t`` written for ``s``, sympy and torch's functions
cancel common factors, and a condition that becomes true said no more than the divisibility did. Some
divisibilities are disguised (``s*s == 4*(s//2)*(s//2)``), so equations are divided by positive terms, and
factored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import gcd, prod
from typing import Any

import sympy
from sympy.core.intfunc import ilcm

from fake.seam import symbolic_shapes as _t
from fake.symbols.expr import normalize, without_common_factor

_ROUNDS = 4
_MAX_OPERATIONS = 60
_DIVISIONS = (_t.FloorDiv, _t.Mod, _t.PythonMod)

LowerBound = Callable[[sympy.Basic], int]
"""Returns the least value of a symbol (0 or less if unknown)."""


def without_divisions(conditions: Mapping[sympy.Basic, Any], lower: LowerBound) -> dict[sympy.Basic, Any]:
    """Return simpler conditions that are equivalent together, each with the mapping's value for its original.

    >>> a, b = sympy.symbols("a b", integer=True, positive=True)
    >>> half = _t.FloorDiv(a, 2)
    >>> asked = [sympy.Eq(_t.Mod(a, 2), 0), sympy.Eq(_t.FloorDiv(a, half), 2), sympy.Eq(a * b, 4 * half * _t.FloorDiv(b, 2))]
    >>> list(without_divisions(dict.fromkeys(asked), lambda symbol: 2))
    [Eq(Mod(a, 2), 0), Eq(Mod(b, 2), 0)]
    """
    found = dict(conditions)
    if not any(condition.has(*_DIVISIONS) for condition in found):
        return found
    found = {
        part: owner for condition, owner in found.items() for part in _split_into_factors(condition, lower)
    }
    for _ in range(_ROUNDS):
        multiples = _Multiples(found, lower)
        simpler: dict[sympy.Basic, Any] = {}
        for condition, owner in found.items():
            simplified = multiples.simplest(condition)
            if simplified is not sympy.true:
                simpler.setdefault(simplified, owner)
        if simpler.keys() == found.keys():
            break
        found = simpler
    # In this order, a check divides by ``s // k`` only once ``k`` is known to divide ``s``: it is not zero.
    return dict(sorted(found.items(), key=lambda item: _divisibility(item[0]) is None))


class _Multiples:
    """The divisibilities stated by some conditions, of sizes and of sums and products of them:
    ``s = k * part``.

    Attributes:
        divisors: divisible terms, and what divides them.
        parts: a symbol for the quotient of each.
        dividends: the inverse mapping.
        values: quotients, remainders and extremes that an equation defines, and their values.
        excluded: for divisible terms, values that they do not have, each with the condition that says so.
    """

    def __init__(self, conditions: Mapping[sympy.Basic, Any], lower: LowerBound) -> None:
        self.lower = lower
        self.divisors: dict[sympy.Basic, int] = {}
        for condition in conditions:
            found = _divisibility(condition)
            if found is not None and self._least(found[0]) >= 1:
                whole, divisor = found
                known = self.divisors.get(whole, 1)
                self.divisors[whole] = known * divisor // gcd(known, divisor)
        self.parts = {
            whole: sympy.Symbol(f"part_{index}", integer=True, positive=True)
            for index, whole in enumerate(self.divisors)
        }
        self.dividends = {part: whole for whole, part in self.parts.items()}
        self.values = dict(filter(None, map(_defined_value, conditions)))
        self.excluded: dict[sympy.Basic, dict[int, sympy.Basic]] = {}
        for condition in conditions:
            if isinstance(condition, sympy.Ne) and condition.lhs in self.parts and condition.rhs.is_Integer:
                self.excluded.setdefault(condition.lhs, {})[int(condition.rhs)] = condition
        self._current_condition: sympy.Basic | None = None

    def simplest(self, condition: sympy.Basic) -> sympy.Basic:
        """Return the simplest form of a condition, given the divisibilities and values
        (which stay as they are)."""
        self._current_condition = condition
        divisible = _divisibility(condition)
        if divisible is not None and divisible[0] in self.divisors:
            return sympy.Eq(_t.Mod(divisible[0], self.divisors[divisible[0]]), 0)
        if sympy.count_ops(condition) > _MAX_OPERATIONS:
            return condition
        valued = _defined_value(condition)
        known = {
            term: value
            for term, value in self.values.items()
            if valued is None or (term != valued[0] and not value.has(valued[0]))
        }
        inner = condition.xreplace(known) if known else condition
        inner = inner.xreplace({whole: self.divisors[whole] * part for whole, part in self.parts.items()})
        inner = _cancelled(inner, self._is_positive)
        inner = self._rewrite_mod_of_one(inner)
        if not isinstance(inner, sympy.logic.boolalg.BooleanAtom):
            inner = self._rewrite_equation(normalize(inner, self._is_positive))
        if isinstance(inner, sympy.logic.boolalg.BooleanAtom):
            return inner if inner is sympy.true else condition
        if self._is_obvious(inner):
            return sympy.true
        outer = self._eliminate_parts(inner)
        return condition if sympy.count_ops(outer) >= sympy.count_ops(condition) else outer

    def _least(self, term: sympy.Basic) -> int:
        """Return a lower bound of a symbol, a part, a quotient by a number, or a sum of products;
        0 if unknown."""
        if term in self.__dict__.get("dividends", ()):
            whole = self.dividends[term]
            divisor = self.divisors[whole]
            quotient = max(1, -(-self._least(whole) // divisor))
            excluded = self.__dict__.get("excluded", {}).get(whole, {})
            # A condition must not serve as its own proof.
            while excluded.get(quotient * divisor, self._current_condition) is not self._current_condition:
                quotient += 1
            return quotient
        if term.is_Symbol:
            return self.lower(term)
        if term.is_Integer:
            return int(term)
        if isinstance(term, _t.FloorDiv) and term.args[1].is_Integer and term.args[1] > 0:
            return max(self._least(term.args[0]), 0) // int(term.args[1])
        if term.is_Add or term.is_Mul:
            least = [self._least(part) for part in term.args]
            return 0 if min(least) < 1 else sum(least) if term.is_Add else prod(least)
        if term.is_Pow and term.exp.is_Integer and term.exp > 0:
            return max(self._least(term.base), 0) ** int(term.exp)
        return 0

    def _is_obvious(self, condition: sympy.Basic) -> bool:
        """Return whether the least values alone imply that a term is greater than a number."""
        match condition:
            case (
                sympy.Ge(args=(term, sympy.Integer() as number))
                | sympy.Le(args=(sympy.Integer() as number, term))
            ):
                return self._least(term) >= max(number, 1)
            case (
                sympy.Gt(args=(term, sympy.Integer() as number))
                | sympy.Lt(args=(sympy.Integer() as number, term))
            ):
                return self._least(term) > max(number, 0)
            case (
                sympy.Ne(args=(term, sympy.Integer() as number))
                | sympy.Ne(args=(sympy.Integer() as number, term))
            ):
                return self._least(term) > max(number, 0)
        return False

    def _rewrite_mod_of_one(self, condition: sympy.Basic) -> sympy.Basic:
        """Rewrite ``1 % k == 0`` as ``k == 1`` if ``k`` is positive:
        reshapes ask whether a size of one can be split."""
        match condition:
            case sympy.Eq() | sympy.Ne() if condition.rhs == 0 and isinstance(
                condition.lhs, (_t.Mod, _t.PythonMod)
            ):
                base, divisor = condition.lhs.args
                if base == 1 and self._is_positive(divisor):
                    return condition.func(divisor, 1)
        return condition

    def _is_positive(self, term: sympy.Basic) -> bool:
        return self._least(term) >= 1

    def _rewrite_equation(self, condition: sympy.Basic) -> sympy.Basic:
        """Rewrite ``p*q == 0`` as ``q == 0`` if ``p`` is positive,
        and ``x == k*(x//k)`` as ``x % k == 0``."""
        if not isinstance(condition, (sympy.Eq, sympy.Ne)) or not condition.lhs.is_integer:
            return condition
        difference = sympy.expand(condition.lhs - condition.rhs)
        if difference.is_Integer or sympy.count_ops(difference) > _MAX_OPERATIONS:
            return condition
        atoms = {term: sympy.Dummy(integer=True) for term in difference.atoms(*_DIVISIONS, _t.Max, _t.Min)}
        outermost = {term: name for term, name in atoms.items() if difference.has(term)}
        plain = difference.xreplace(outermost)
        if not plain.is_polynomial(*plain.free_symbols):
            return condition
        names = {name: term for term, name in outermost.items()}
        factors = [factor for factor, _ in sympy.factor_list(plain)[1]]
        rest = [f for f in factors if not self._is_sum_of_positives(f, names)]
        if len(rest) != 1:
            return condition
        zero = rest[0].xreplace(names)
        divided = _multiple_of(zero)
        if divided is not None:
            return condition.func(_t.Mod(*divided), 0)
        terms = sympy.Add.make_args(zero)
        right = sympy.Add(*(-term for term in terms if term.could_extract_minus_sign()))
        rewritten = condition.func(zero + right, right)
        return rewritten if sympy.count_ops(rewritten) < sympy.count_ops(condition) else condition

    def _is_sum_of_positives(self, factor: sympy.Basic, names: Mapping[sympy.Basic, sympy.Basic]) -> bool:
        for term in sympy.Add.make_args(factor):
            coefficient, rest = term.as_coeff_Mul()
            if coefficient <= 0:
                return False
            for base in sympy.Mul.make_args(rest):
                symbol = base.base if base.is_Pow else base
                if not symbol.is_Integer and not self._is_positive(names.get(symbol, symbol)):
                    return False
        return True

    def _eliminate_parts(self, condition: sympy.Basic) -> sympy.Basic:
        """Eliminate the parts; equations and inequalities of sums and products are multiplied out."""
        used = [part for part in self.dividends if condition.has(part)]
        if not used:
            return condition
        divided = _divisibility(condition)
        if divided is not None and divided[0] in self.dividends:
            whole = self.dividends[divided[0]]
            return sympy.Eq(_t.Mod(whole, divided[1] * self.divisors[whole]), 0)
        if isinstance(condition, sympy.core.relational.Relational) and not condition.has(*_DIVISIONS):
            difference = condition.lhs - condition.rhs
            if difference.is_polynomial(*difference.free_symbols):
                substitution = {
                    p: self.dividends[p] / sympy.Integer(self.divisors[self.dividends[p]]) for p in used
                }
                scaled = sympy.expand(difference.xreplace(substitution))
                terms = sympy.Add.make_args(scaled)
                scaled = sympy.expand(scaled * reduce(ilcm, [t.as_coeff_Mul()[0].q for t in terms], 1))
                terms = sympy.Add.make_args(scaled)
                right = sympy.Add(*(-t for t in terms if t.could_extract_minus_sign() or t.is_Integer))
                return condition.func(scaled + right, right)
        return condition.xreplace(
            {part: _t.FloorDiv(self.dividends[part], self.divisors[self.dividends[part]]) for part in used}
        )


def _defined_value(condition: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic] | None:
    """Return the term and value of an equation that defines a quotient,
    remainder or extreme by something simpler."""
    if isinstance(condition, sympy.Eq):
        for term, value in (condition.args, reversed(condition.args)):
            if (
                (isinstance(term, (*_DIVISIONS, _t.Max, _t.Min)) or (value.is_Integer and not term.is_Symbol))
                and sympy.count_ops(value) < sympy.count_ops(term)
                and not value.has(term)
                and value != 0
            ):
                return term, value
    return None


def _divisibility(condition: sympy.Basic) -> tuple[sympy.Basic, int] | None:
    """Return dividend and divisor of ``s % number == 0``, for a size or a sum or product of sizes."""
    match condition:
        case sympy.Eq(args=((_t.Mod() | _t.PythonMod()) as remainder, sympy.Integer(p=0))):
            base, divisor = remainder.args
            if (
                divisor.is_Integer
                and divisor > 1
                and not base.is_number
                and not base.has(*_DIVISIONS, _t.Max, _t.Min)
            ):
                return base, int(divisor)
    return None


def _split_into_factors(condition: sympy.Basic, lower: LowerBound) -> list[sympy.Basic]:
    """Split ``a*b == 4*(a//2)*(b//2)``: no factor on the right exceeds its counterpart,
    so both sizes are even."""
    if not isinstance(condition, sympy.Eq) or not condition.lhs.is_integer:
        return [condition]
    for left, right in (condition.args, reversed(condition.args)):
        quotients = [
            (base, int(e)) for base, e in right.as_powers_dict().items() if isinstance(base, _t.FloorDiv)
        ]
        if not quotients or not all(
            q.args[0].is_Symbol and q.args[1].is_Integer and q.args[1] > 1 and lower(q.args[0]) >= 1
            for q, _ in quotients
        ):
            continue
        whole = sympy.Mul(*(q.args[0] ** e for q, e in quotients))
        rounded = sympy.Mul(*((q.args[1] * q) ** e for q, e in quotients))
        if sympy.expand(left * rounded - right * whole) == 0 and all(
            base.is_Symbol and lower(base) >= 1
            for base in left.as_coeff_Mul()[1].as_powers_dict()
            if base is not sympy.S.One
        ):
            return [sympy.Eq(_t.Mod(q.args[0], q.args[1]), 0) for q, _ in quotients]
    return [condition]


def _cancelled(condition: sympy.Basic, positive: Callable[[sympy.Basic], bool]) -> sympy.Basic:
    """Cancel common factors of dividend and divisor in quotients,
    and drop 1 in maxima with a term that is at least 1."""

    def greatest(extreme: Any) -> sympy.Basic:
        others = [part for part in extreme.args if part != 1]
        return (
            extreme if len(others) == len(extreme.args) or not any(map(positive, others)) else _t.Max(*others)
        )

    def reduced(division: Any) -> sympy.Basic:
        base, divisor = division.args
        return _t.FloorDiv(*without_common_factor(base, divisor, positive))

    condition = condition.replace(lambda e: isinstance(e, _t.Max), greatest)
    return condition.replace(lambda e: isinstance(e, _t.FloorDiv), reduced)


def _multiple_of(zero: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic] | None:
    """Return ``x`` and ``k`` of ``x - k*(x//k)``, or of its negative."""
    for quotient in zero.atoms(_t.FloorDiv):
        base, divisor = quotient.args
        if divisor.is_Integer and divisor > 1:
            for sign in (1, -1):
                if sympy.expand(sign * zero - base + divisor * quotient) == 0:
                    return base, divisor
    return None
