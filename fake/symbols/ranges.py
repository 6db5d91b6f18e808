"""What follows from ranges, equalities, inequalities and divisibility of integers: a small decision procedure.

``facts.implies(condition)`` answers yes only if the facts together with the negated condition have no integer
solution. The proof is the Omega test (W. Pugh, "The Omega test: a fast and practical integer programming algorithm for
dependence analysis", 1991) without its dark shadow: equalities are solved exactly over the integers, inequalities are
tightened by the common divisor of their coefficients and eliminated by Fourier and Motzkin's method. That refutes only
what is false; what it cannot refute within its limits counts as not proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import gcd, lcm

import sympy

from . import _torch as _t
from .expr import ONE, Conjunction, Form, Linearizer, Literal, NotLinear, combine, factors_of, normalize

__all__ = ["Facts", "has_no_solution"]

Bounds = tuple[int | None, int | None]

_MOST_INEQUALITIES = 250
_MOST_STEPS = 60
_MOST_BRANCHES = 48


class Facts:
    """A set of conditions that are known to hold.

    What sympy assumes of a symbol (torch makes sizes positive) counts for nothing here, only what was added does.

    >>> s = sympy.Symbol("s", integer=True)
    >>> facts = Facts()
    >>> facts.bound(s, lower=3)
    >>> facts.implies(sympy.Ge(s, 2)), facts.implies(sympy.Ge(s, 4))
    (True, False)
    """

    def __init__(self) -> None:
        self._conditions: list[sympy.Basic] = []
        self._verbatim: set[sympy.Basic] = set()
        self._bounds: dict[sympy.Basic, Bounds] = {}
        self._prepared: tuple[_System, _Rename] | None = None

    def add(self, condition: sympy.Basic) -> None:
        """Take a condition as true."""
        self._conditions.append(condition)
        self._verbatim.add(condition)
        self._prepared = None

    def bound(self, symbol: sympy.Symbol, lower: int | None = None, upper: int | None = None) -> None:
        """Take ``lower <= symbol <= upper`` as true; ``None`` is no bound."""
        old_lower, old_upper = self._bounds.get(symbol, (None, None))
        self._bounds[symbol] = (
            old_lower if lower is None else lower if old_lower is None else max(lower, old_lower),
            old_upper if upper is None else upper if old_upper is None else min(upper, old_upper),
        )
        self._prepared = None

    def implies(self, condition: sympy.Basic) -> bool:
        """Whether ``condition`` holds wherever all facts hold. ``False`` also means "not proved"."""
        if condition in self._verbatim:
            return True
        if self._prepared is None:
            self._prepared = self._prepare()
        system, rename = self._prepared
        return system.implies(rename(condition))

    def _prepare(self) -> tuple[_System, _Rename]:
        """The facts over symbols of which sympy knows what is known here, ``k*t`` for what ``k`` divides.

        With ``k*t``, sympy and torch's functions simplify divisions by themselves.
        """
        plain = _Rename(self._bounds, {})
        divisors: dict[sympy.Basic, int] = {}
        for condition in self._conditions:
            match plain(condition):
                case sympy.Eq(args=((_t.Mod() | _t.PythonMod()) as remainder, sympy.Integer(p=0))):
                    base, divisor = remainder.args
                    if base in plain.originals and isinstance(divisor, sympy.Integer):
                        symbol = plain.originals[base]
                        divisors[symbol] = lcm(divisors.get(symbol, 1), int(divisor))
        rename = _Rename(self._bounds, divisors) if divisors else plain
        system = _System()
        for symbol in self._bounds:
            system.bound(rename.symbol_for(symbol), *rename.bounds_of(symbol))
        for condition in self._conditions:
            system.add(rename(condition))
        return system, rename


class _Rename:
    """Puts symbols with honest assumptions in place of torch's, in normalized conditions."""

    def __init__(self, bounds: Mapping[sympy.Basic, Bounds], divisors: Mapping[sympy.Basic, int]) -> None:
        self._bounds, self._divisors = bounds, divisors
        self._images: dict[sympy.Basic, sympy.Basic] = {}
        self.originals: dict[sympy.Basic, sympy.Basic] = {}

    def __call__(self, condition: sympy.Basic) -> sympy.Basic:
        images = {symbol: self._image(symbol) for symbol in condition.free_symbols}
        return normalize(condition.xreplace(images), lambda symbol: bool(symbol.is_positive))

    def _image(self, symbol: sympy.Basic) -> sympy.Basic:
        found = self._images.get(symbol)
        if found is None:
            lower, _ = self.bounds_of(symbol)
            assumed = {"integer": True} if symbol.is_integer else {"real": True}
            if lower is not None and lower >= 0:
                assumed["positive" if lower > 0 else "nonnegative"] = True
            divisor = self._divisors.get(symbol, 1)
            made = sympy.Symbol(f"{symbol}/{divisor}" if divisor > 1 else str(symbol), **assumed)
            self.originals[made] = symbol
            found = self._images[symbol] = divisor * made
        return found

    def symbol_for(self, symbol: sympy.Basic) -> sympy.Basic:
        """What stands in place of a symbol, without its divisor."""
        return self._image(symbol) / self._divisors.get(symbol, 1)

    def bounds_of(self, symbol: sympy.Basic) -> Bounds:
        """The bounds of what stands in place of a symbol."""
        lower, upper = self._bounds.get(symbol, (None, None))
        divisor = self._divisors.get(symbol, 1)
        lower = None if lower is None else -(-lower // divisor)
        upper = None if upper is None else upper // divisor
        return lower, upper


class _System:
    """Clauses over linear forms, and the search for a contradiction among them."""

    def __init__(self) -> None:
        self._linearizer = Linearizer()
        self._clauses: list[tuple[Conjunction, ...]] = []
        self._bounds: dict[sympy.Basic, Bounds] = {}

    def add(self, condition: sympy.Basic) -> None:
        with suppress(NotLinear):  # then nothing follows from it
            self._clauses.append(self._linearizer.alternatives(condition))

    def bound(self, symbol: sympy.Basic, lower: int | None, upper: int | None) -> None:
        literals = []
        if lower is not None:
            literals.append(Literal.of(combine({symbol: 1}, {ONE: -lower})))
        if upper is not None:
            literals.append(Literal.of(combine({ONE: upper}, {symbol: -1})))
        if literals:
            self._clauses.append((tuple(literals),))
        self._bounds[symbol] = (lower, upper)

    def implies(self, condition: sympy.Basic) -> bool:
        try:
            refuted = self._linearizer.alternatives(condition, truth=False)
        except NotLinear:
            return False
        return all(self._excludes(conjunction) for conjunction in refuted)

    def _excludes(self, conjunction: Conjunction) -> bool:
        """Whether the conjunction contradicts the facts."""
        relevant = self._relevant(conjunction)
        fixed = [*conjunction, *(literal for clause in relevant if len(clause) == 1 for literal in clause[0])]
        branching = sorted((clause for clause in relevant if len(clause) != 1), key=len)
        return self._refute(fixed, branching, [_MOST_BRANCHES])

    def _refute(
        self, fixed: list[Literal], branching: list[tuple[Conjunction, ...]], budget: list[int]
    ) -> bool:
        if budget[0] <= 0:
            return False
        budget[0] -= 1
        if has_no_solution(fixed):
            return True
        if not branching:
            return False
        first, *others = branching
        return all(self._refute([*fixed, *alternative], others, budget) for alternative in first)

    def _relevant(self, conjunction: Conjunction) -> list[tuple[Conjunction, ...]]:
        """The facts, and the definitions of the terms in them, that share symbols with a conjunction."""
        clauses = [*self._clauses, *self._definitions(), *self._about_products()]
        symbols_of = [_symbols(literal for part in clause for literal in part) for clause in clauses]
        reached = _symbols(conjunction)
        pending = list(range(len(clauses)))
        chosen: list[int] = []
        grown = True
        while grown:
            near = [place for place in pending if symbols_of[place] & reached or not symbols_of[place]]
            grown = bool(near)
            chosen += near
            for place in near:
                pending.remove(place)
                reached |= symbols_of[place]
        return [clauses[place] for place in sorted(chosen)]

    def _definitions(self) -> Iterable[tuple[Conjunction, ...]]:
        for clauses in list(self._linearizer.definitions.values()):
            yield from clauses

    def _about_products(self) -> Iterable[tuple[Conjunction, ...]]:
        """``(x - low_x) * (y - low_y) >= 0`` and its like, for each product and each way to split off a factor."""
        for term in list(self._linearizer.products):
            lower, upper = self._bounds_of(term)
            if lower is not None:
                yield ((Literal.of({term: 1, ONE: -lower} if lower else {term: 1}),),)
            if upper is not None:
                yield ((Literal.of(combine({ONE: upper}, {term: -1})),),)
            for factor in set(factors_of(term)):
                rest = term / factor
                rest_form = self._linearizer.form(rest) if rest.is_integer else None
                low_x, high_x = self._bounds.get(factor, (None, None))
                low_y, high_y = self._bounds_of(rest)
                if rest_form is None:
                    continue
                x: Form = {factor: 1}
                for bound_x, bound_y, sign in (
                    (low_x, low_y, 1),
                    (high_x, high_y, 1),
                    (low_x, high_y, -1),
                    (high_x, low_y, -1),
                ):
                    if bound_x is None or bound_y is None:
                        continue
                    form = combine({term: 1}, rest_form, -bound_x)
                    form = combine(combine(form, x, -bound_y), {ONE: bound_x * bound_y})
                    yield ((Literal.of(combine({}, form, sign)),),)

    def _bounds_of(self, term: sympy.Basic) -> tuple[int | None, int | None]:
        """Bounds of a product of symbols that are all known not to be negative."""
        lower, upper = 1, 1
        unbounded = False
        for factor in factors_of(term):
            low, high = self._bounds.get(factor, (None, None))
            if isinstance(factor, sympy.Integer):
                low = high = int(factor)
            if low is None or low < 0:
                return None, None
            lower *= low
            unbounded = unbounded or high is None
            upper *= high or 0
        return lower, None if unbounded else upper


def _symbols(literals: Iterable[Literal]) -> set[sympy.Basic]:
    found: set[sympy.Basic] = set()
    for literal in literals:
        for atom, _ in literal.terms:
            found |= atom.free_symbols
    return found


def has_no_solution(literals: Iterable[Literal]) -> bool:
    """Whether literals are proved to have no common integer solution.

    >>> x, y = sympy.symbols("x y", integer=True)
    >>> has_no_solution([Literal.of({x: 2, y: -4, ONE: -1}, equal=True)])  # an even number is not odd
    True
    """
    equalities: list[Form] = []
    inequalities: list[Form] = []
    for literal in literals:
        (equalities if literal.equal else inequalities).append(literal.form)
    return _Contradiction.found_in(equalities, inequalities)


class _Contradiction(Exception):
    """Raised where a system turns out to have no solution."""

    @classmethod
    def found_in(cls, equalities: list[Form], inequalities: list[Form]) -> bool:
        try:
            reduced = _solve_equalities(equalities, inequalities)
            if reduced is not None:
                _eliminate(reduced)
        except cls:
            return True
        return False


def _solve_equalities(equalities: list[Form], inequalities: list[Form]) -> list[Form] | None:
    """Substitute the solutions of all equalities; ``None`` if that takes too many steps."""
    fresh = 0
    for _ in range(_MOST_STEPS):
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
    """``value`` modulo ``modulus``, in ``[-modulus/2, modulus/2)``."""
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
    """Of inequalities with the same coefficients, the strictest; opposite ones that cross are a contradiction."""
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


def _eliminate(inequalities: list[Form]) -> None:
    """Fourier and Motzkin's elimination, one atom at a time; gives up silently when the system grows too large."""
    for _ in range(_MOST_STEPS):
        inequalities = _strongest(inequalities)
        counts: dict[sympy.Basic, list[int]] = {}
        for form in inequalities:
            for atom, coefficient in form.items():
                if atom is not ONE:
                    counts.setdefault(atom, [0, 0])[coefficient > 0] += 1
        if not counts or len(inequalities) > _MOST_INEQUALITIES:
            return
        atom = min(counts, key=lambda a: counts[a][0] * counts[a][1] - sum(counts[a]))
        above = [form for form in inequalities if form.get(atom, 0) > 0]
        below = [form for form in inequalities if form.get(atom, 0) < 0]
        kept = [form for form in inequalities if atom not in form]
        for low in above:
            for high in below:
                scaled = combine({}, low, -high[atom])
                kept.append(combine(scaled, high, low[atom]))
        inequalities = kept
