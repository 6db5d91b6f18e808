"""Symbolic conditions as linear integer arithmetic.

A condition such as ``Eq(Mod(s0 + 4, 8), 0)`` becomes alternatives of conjunctions of *literals*,
``form >= 0`` or ``form == 0``, where a *linear form* maps atoms to integer coefficients. An atom is a symbol,
a product of symbols, or a term like ``FloorDiv(s0, 8)``; facts about such terms (``8*q <= s0 <= 8*q + 7``)
are collected alongside. Nothing is approximated: a condition that cannot be expressed raises
:class:`NotLinear`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

import sympy
from sympy.logic.boolalg import And, BooleanFalse, BooleanTrue, Not, Or

from fake.seam import symbolic_shapes as _t

ONE = sympy.S.One
"""The atom of a form's constant term."""

Form = dict[sympy.Basic, int]

_MAX_ALTERNATIVES = 32
_HIGHEST_DEGREE = 4


class NotLinear(Exception):
    """The condition involves floats, or functions that integer arithmetic does not cover."""


@dataclass(frozen=True)
class Literal:
    """``form >= 0``, or ``form == 0`` if ``equal``."""

    terms: tuple[tuple[sympy.Basic, int], ...]
    equal: bool = False

    @classmethod
    def of(cls, form: Form, *, equal: bool = False) -> Literal:
        return cls(tuple(form.items()), equal)

    @property
    def form(self) -> Form:
        return dict(self.terms)


Conjunction = tuple[Literal, ...]


def combine(left: Form, right: Form, factor: int = 1) -> Form:
    """Return ``left + factor * right``.

    Args:
        left: coefficients by atom.
        right: coefficients by atom.
        factor: the multiple of ``right``.

    >>> x = sympy.Symbol("x", integer=True)
    >>> combine({x: 2, ONE: 1}, {x: 1}, -2)
    {1: 1}
    """
    result = dict(left)
    for atom, coefficient in right.items():
        total = result.get(atom, 0) + factor * coefficient
        if total:
            result[atom] = total
        else:
            result.pop(atom, None)
    return result


class Linearizer:
    """Turns conditions into literals, and collects facts about non-linear atoms on the way.

    Attributes:
        definitions: facts about each atom by its meaning: lists of alternatives, one of which holds.
        products: the products of symbols that occur as atoms.
    """

    def __init__(self) -> None:
        self.definitions: dict[sympy.Basic, list[tuple[Conjunction, ...]]] = {}
        self.products: set[sympy.Basic] = set()
        self._forms: dict[sympy.Basic, Form] = {}

    def alternatives(self, condition: sympy.Basic, truth: bool = True) -> tuple[Conjunction, ...]:
        """Return conjunctions, at least one of which holds exactly if ``condition`` has the value ``truth``.

        Raises:
            NotLinear: the condition is not about integer arithmetic, or has too many cases.
        """
        if isinstance(condition, (BooleanTrue, BooleanFalse)):
            return ((),) if bool(condition) == truth else ()
        if isinstance(condition, Not):
            return self.alternatives(condition.args[0], not truth)
        if isinstance(condition, (And, Or)):
            parts = [self.alternatives(part, truth) for part in condition.args]
            return _all_of(parts) if isinstance(condition, And) == truth else _any_of(parts)
        if not isinstance(condition, sympy.core.relational.Relational):
            raise NotLinear(condition)
        return self._relation(condition if truth else condition.negated)

    def _relation(self, condition: sympy.Basic) -> tuple[Conjunction, ...]:
        left, right = self.form(condition.args[0]), self.form(condition.args[1])
        difference = combine(left, right, -1)
        opposite = combine(right, left, -1)
        match condition:
            case sympy.Eq():
                return ((Literal.of(difference, equal=True),),)
            case sympy.Ne():
                return (
                    (Literal.of(combine(difference, {ONE: -1})),),
                    (Literal.of(combine(opposite, {ONE: -1})),),
                )
            case sympy.Ge():
                return ((Literal.of(difference),),)
            case sympy.Gt():
                return ((Literal.of(combine(difference, {ONE: -1})),),)
            case sympy.Le():
                return ((Literal.of(opposite),),)
            case sympy.Lt():
                return ((Literal.of(combine(opposite, {ONE: -1})),),)
        raise NotLinear(condition)

    def form(self, expression: sympy.Basic) -> Form:
        """Return the linear form of an integer expression.

        Raises:
            NotLinear: the expression is not an integer.
        """
        found = self._forms.get(expression)
        if found is None:
            found = self._forms[expression] = self._form(sympy.sympify(expression))
        return found

    def _form(self, expression: sympy.Basic) -> Form:
        if isinstance(expression, sympy.Integer):
            return {ONE: int(expression)} if expression else {}
        if not expression.is_integer:
            raise NotLinear(expression)
        if isinstance(expression, sympy.Add):
            total: Form = {}
            for part in expression.args:
                total = combine(total, self.form(part))
            return total
        if isinstance(expression, (sympy.Mul, sympy.Pow)):
            return self._product(expression)
        if not isinstance(expression, sympy.Symbol):
            self._define(expression)
        return {expression: 1}

    def _product(self, expression: sympy.Basic) -> Form:
        expanded = sympy.expand(expression)
        if isinstance(expanded, sympy.Add):
            return self.form(expanded)
        coefficient, rest = expanded.as_coeff_Mul()
        if not isinstance(coefficient, sympy.Integer):
            raise NotLinear(expression)
        if not isinstance(rest, (sympy.Mul, sympy.Pow)):
            return combine({}, self.form(rest), int(coefficient))
        factors = factors_of(rest)
        for factor in factors:
            if not isinstance(factor, sympy.Symbol):
                self.form(factor)
        if len(factors) <= _HIGHEST_DEGREE:
            self.products.add(rest)
        return {rest: int(coefficient)}

    def _define(self, term: sympy.Basic) -> None:
        if term in self.definitions:
            return
        self.definitions[term] = []
        match term:
            case _t.FloorDiv():
                base, divisor = term.args
                self._define_division(term, base, divisor, None)
            case _t.Mod() | _t.PythonMod():
                base, divisor = term.args
                self._define_division(_t.FloorDiv(base, divisor), base, divisor, term)
            case _t.Max() | _t.Min():
                self._define_extreme(term)

    def _define_division(
        self, quotient: sympy.Basic, base: sympy.Basic, divisor: sympy.Basic, remainder: sympy.Basic | None
    ) -> None:
        """Add ``base == divisor * quotient + remainder`` with ``0 <= remainder < divisor``."""
        if not (isinstance(divisor, sympy.Integer) and divisor > 0):
            return  # no fact is known
        step = int(divisor)
        rest = combine(self.form(base), self.form(quotient), -step)
        facts = [Literal.of(rest), Literal.of(combine({ONE: step - 1}, rest, -1))]
        if remainder is not None:
            facts.append(Literal.of(combine(rest, {remainder: 1}, -1), equal=True))
        owner = remainder if remainder is not None else quotient
        self.definitions[owner].append((tuple(facts),))

    def _define_extreme(self, term: sympy.Basic) -> None:
        """Add that a maximum is at least each argument, and equal to one of them (likewise for a minimum)."""
        sign = 1 if isinstance(term, _t.Max) else -1
        above = [combine({term: sign}, self.form(part), -sign) for part in term.args]
        self.definitions[term].append((tuple(Literal.of(form) for form in above),))
        if len(above) <= 3:
            self.definitions[term].append(tuple((Literal.of(form, equal=True),) for form in above))


def normalize(condition: sympy.Basic, positive: Callable[[sympy.Basic], bool]) -> sympy.Basic:
    """Return an equivalent condition without common factors of positive symbols.

    >>> a, b = sympy.symbols("a b", integer=True, positive=True)
    >>> normalize(sympy.Eq(_t.Mod(a * b, 2 * b), 0), lambda symbol: True)
    Eq(Mod(a, 2), 0)
    """
    if not isinstance(condition, sympy.core.relational.Relational) or not condition.lhs.is_integer:
        return condition
    found = condition.replace(
        lambda e: isinstance(e, (_t.Mod, _t.PythonMod)), lambda e: _reduced_remainder(e, positive)
    )
    if not isinstance(found, sympy.core.relational.Relational):
        return found
    difference = sympy.expand(found.lhs - found.rhs)
    factor, (reduced,) = _without_common_factor([difference], positive)
    terms = sympy.Add.make_args(reduced)
    right = sympy.Add(*(-term for term in terms if term.could_extract_minus_sign()))
    told = found.func(reduced + right, right)
    return found if factor == 1 and sympy.count_ops(told) >= sympy.count_ops(found) else told


def _reduced_remainder(remainder: Any, positive: Callable[[sympy.Basic], bool]) -> sympy.Basic:
    """Rewrite ``Mod(a*k, b*k)`` as ``k * Mod(a, b)``."""
    factor, (base, divisor) = _without_common_factor(map(sympy.expand, remainder.args), positive)
    return remainder if factor == 1 else factor * remainder.func(base, divisor)


def without_common_factor(
    base: sympy.Basic, divisor: sympy.Basic, positive: Callable[[sympy.Basic], bool]
) -> tuple[sympy.Basic, sympy.Basic]:
    """Divide two sums of products by the numbers and positive symbols that divide both.

    Args:
        base: the dividend.
        divisor: the divisor.
        positive: whether a symbol is known to be positive.

    Returns:
        Both, expanded and divided by their common factor.
    """
    _, (left, right) = _without_common_factor([sympy.expand(base), sympy.expand(divisor)], positive)
    return left, right


def _without_common_factor(
    sums: Iterable[sympy.Basic], positive: Callable[[sympy.Basic], bool]
) -> tuple[sympy.Basic, list[sympy.Basic]]:
    """Return the product of numbers and positive symbols that divides every term,
    and the sums divided by it."""
    sums = list(sums)
    terms = [term.as_coeff_Mul() for total in sums for term in sympy.Add.make_args(total) if term != 0]
    if not terms or not all(isinstance(coefficient, sympy.Integer) for coefficient, _ in terms):
        return ONE, sums
    factor = sympy.Integer(gcd(*(int(coefficient) for coefficient, _ in terms)))
    shared = Counter(factors_of(terms[0][1]))
    for _, rest in terms[1:]:
        shared &= Counter(factors_of(rest))
    for symbol, power in shared.items():
        if isinstance(symbol, sympy.Symbol | _t.FloorDiv) and positive(symbol):
            factor *= symbol**power
    return (factor, sums) if factor == 1 else (factor, [sympy.expand(total / factor) for total in sums])


def factors_of(term: sympy.Basic) -> list[sympy.Basic]:
    """Return the factors of a product, with powers repeated; the list for a high power is truncated."""
    found: list[sympy.Basic] = []
    for factor in term.args if isinstance(term, sympy.Mul) else (term,):
        if isinstance(factor, sympy.Pow) and isinstance(factor.exp, sympy.Integer) and factor.exp > 0:
            found += [factor.base] * min(int(factor.exp), _HIGHEST_DEGREE + 1)
        else:
            found.append(factor)
    return found


def _all_of(parts: Iterable[tuple[Conjunction, ...]]) -> tuple[Conjunction, ...]:
    found: tuple[Conjunction, ...] = ((),)
    for part in parts:
        found = tuple((*left, *right) for left, right in product(found, part))
        if len(found) > _MAX_ALTERNATIVES:
            raise NotLinear("too many cases")
    return found


def _any_of(parts: Iterable[tuple[Conjunction, ...]]) -> tuple[Conjunction, ...]:
    found = tuple(conjunction for part in parts for conjunction in part)
    if len(found) > _MAX_ALTERNATIVES:
        raise NotLinear("too many cases")
    return found
