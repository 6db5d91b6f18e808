"""Prove that linear equalities and inequalities over the integers have no common solution.

The method is the Omega test (W. Pugh, "The Omega test: a fast and practical integer programming algorithm for
dependence analysis", 1991) without its dark shadow: equalities are solved exactly over the integers,
inequalities are tightened by the common divisor of their coefficients and eliminated by Fourier and Motzkin's
method. It refutes only what is false.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import sympy

from fake.symbols.expr import ONE, Form, Literal, combine

_MAX_INEQUALITIES = 150
_MAX_STEPS = 60
MAX_EFFORT = 2_500
"""The most that one proof may spend of an :class:`Effort`."""


class Effort:
    """The remaining budget for proofs, in combinations of two inequalities:
    a limit that does not depend on time."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._proof = 0

    def start(self) -> None:
        """Begin a proof, and limit it to its share."""
        self._proof = min(self._left, MAX_EFFORT)

    def spend(self, amount: int) -> bool:
        """Spend part of the budget; returns whether enough was left."""
        self._left -= amount
        self._proof -= amount
        return self._proof >= 0


def has_no_solution(literals: Iterable[Literal], effort: Effort | None = None) -> bool:
    """Return whether literals are proved to have no common integer solution.

    >>> x, y = sympy.symbols("x y", integer=True)
    >>> has_no_solution([Literal.of({x: 2, y: -4, ONE: -1}, equal=True)])  # an even number is not odd
    True
    """
    equalities: list[Form] = []
    inequalities: list[Form] = []
    for literal in literals:
        (equalities if literal.equal else inequalities).append(literal.form)
    try:
        reduced = _solve_equalities(equalities, inequalities)
        if reduced is not None:
            _eliminate(reduced, effort or Effort(MAX_EFFORT))
    except _Contradiction:
        return True
    return False


class _Contradiction(Exception):
    """Raised when a system turns out to have no solution."""


def _solve_equalities(equalities: list[Form], inequalities: list[Form]) -> list[Form] | None:
    """Substitute the solutions of all equalities; ``None`` if that takes too many steps."""
    fresh = 0
    for _ in range(_MAX_STEPS):
        equalities = [form for form in map(_tighten_equality, equalities) if form]
        if not equalities:
            return inequalities
        form = min(equalities, key=lambda f: (min(abs(c) for a, c in f.items() if a is not ONE), len(f)))
        atom, coefficient = min(
            ((a, c) for a, c in form.items() if a is not ONE), key=lambda item: abs(item[1])
        )
        if abs(coefficient) == 1:
            solution = {a: -coefficient * c for a, c in form.items() if a != atom}
            equalities.remove(form)
        else:
            # Pugh's step: with a new variable, the coefficients of the equality shrink.
            fresh += 1
            modulus = abs(coefficient) + 1
            sign = 1 if coefficient > 0 else -1
            solution = {a: sign * _symmetric_mod(c, modulus) for a, c in form.items() if a != atom}
            solution = {a: c for a, c in solution.items() if c}
            solution[sympy.Dummy(f"omega{fresh}", integer=True)] = -sign * modulus
        equalities = [_substitute(f, atom, solution) for f in equalities]
        inequalities = [_substitute(f, atom, solution) for f in inequalities]
    return None


def _symmetric_mod(value: int, modulus: int) -> int:
    """Return ``value`` modulo ``modulus``, in ``[-modulus/2, modulus/2)``."""
    return value - modulus * ((2 * value + modulus) // (2 * modulus))


def _substitute(form: Form, atom: sympy.Basic, solution: Form) -> Form:
    coefficient = form.get(atom)
    if coefficient is None:
        return form
    return combine({a: c for a, c in form.items() if a != atom}, solution, coefficient)


def _divisor(form: Form) -> int:
    return gcd(*(c for a, c in form.items() if a is not ONE))


def _tighten_equality(form: Form) -> Form:
    divisor = _divisor(form)
    constant = form.get(ONE, 0)
    if divisor == 0:
        if constant:
            raise _Contradiction
        return {}
    if constant % divisor:
        raise _Contradiction
    return {a: c // divisor for a, c in form.items()}


def _tighten(form: Form) -> Form:
    """Divide an inequality by the common divisor of its coefficients, rounding its constant down."""
    divisor = _divisor(form)
    if divisor == 0:
        if form.get(ONE, 0) < 0:
            raise _Contradiction
        return {}
    reduced = {a: c // divisor for a, c in form.items() if a is not ONE}
    constant = form.get(ONE, 0) // divisor
    return {**reduced, ONE: constant} if constant else reduced


def _strongest(forms: Iterable[Form]) -> list[Form]:
    """Keep the strictest of inequalities with the same coefficients;
    opposite ones that cross are a contradiction."""
    best: dict[frozenset, int] = {}
    for form in forms:
        form = _tighten(form)
        if not form:
            continue
        key = frozenset((a, c) for a, c in form.items() if a is not ONE)
        constant = form.get(ONE, 0)
        best[key] = min(best.get(key, constant), constant)
    for key, constant in best.items():
        opposite = best.get(frozenset((a, -c) for a, c in key))
        if opposite is not None and constant + opposite < 0:
            raise _Contradiction
    return [{**dict(key), **({ONE: constant} if constant else {})} for key, constant in best.items()]


def _eliminate(inequalities: list[Form], effort: Effort) -> None:
    """Eliminate one atom at a time, by Fourier and Motzkin's method;
    give up silently if the system grows too large."""
    for _ in range(_MAX_STEPS):
        inequalities = _strongest(inequalities)
        counts: dict[sympy.Basic, list[int]] = {}
        for form in inequalities:
            for atom, coefficient in form.items():
                if atom is not ONE:
                    counts.setdefault(atom, [0, 0])[coefficient > 0] += 1
        if not counts or len(inequalities) > _MAX_INEQUALITIES:
            return
        atom = min(counts, key=lambda a: counts[a][0] * counts[a][1] - sum(counts[a]))
        if not effort.spend(len(inequalities) + counts[atom][0] * counts[atom][1]):
            return
        above = [form for form in inequalities if form.get(atom, 0) > 0]
        below = [form for form in inequalities if form.get(atom, 0) < 0]
        kept = [form for form in inequalities if atom not in form]
        for low in above:
            for high in below:
                scaled = combine({}, low, -high[atom])
                kept.append(combine(scaled, high, low[atom]))
        inequalities = kept
