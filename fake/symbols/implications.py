"""A small decision procedure for ranges, equalities, inequalities and divisibility of integers.

``facts.implies(condition)`` returns True only if the facts together with the negated condition are refuted:
:mod:`fake.symbols.omega` proves that they have no integer solution. What it cannot refute within its limits
counts as not proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm

import sympy

from fake.seam import symbolic_shapes as _t
from fake.symbols.expr import (
    ONE,
    Conjunction,
    Form,
    Linearizer,
    Literal,
    NotLinear,
    combine,
    factors_of,
    normalize,
)
from fake.symbols.omega import Effort, has_no_solution

Bounds = tuple[int | None, int | None]

_MAX_BRANCHING = 6
_MAX_CLAUSES = 40


class Facts:
    """A set of conditions that are known to hold.

    sympy's assumptions about a symbol (torch makes sizes positive) are ignored:
    only conditions added here count.

    >>> s = sympy.Symbol("s", integer=True)
    >>> facts = Facts()
    >>> facts.bound(s, lower=3)
    >>> facts.implies(sympy.Ge(s, 2)), facts.implies(sympy.Ge(s, 4))
    (True, False)
    """

    def __init__(self, effort: int = 40_000) -> None:
        self._conditions: dict[sympy.Basic, None] = {}
        self._bounds: dict[sympy.Basic, Bounds] = {}
        self._prepared: _Prepared | None = None
        self._effort = Effort(effort)

    def add(self, condition: sympy.Basic) -> None:
        """Assume a condition."""
        self._conditions[condition] = None
        self._prepared = None

    def remove(self, condition: sympy.Basic) -> None:
        """Stop assuming a condition."""
        del self._conditions[condition]
        self._prepared = None if self._prepared is None else self._prepared.without(frozenset((condition,)))

    def bound(self, symbol: sympy.Symbol, lower: int | None = None, upper: int | None = None) -> None:
        """Assume ``lower <= symbol <= upper``; ``None`` is no bound.

        Args:
            symbol: the symbol.
            lower: the least value.
            upper: the greatest value.
        """
        old_lower, old_upper = self._bounds.get(symbol, (None, None))
        self._bounds[symbol] = (
            old_lower if lower is None else lower if old_lower is None else max(lower, old_lower),
            old_upper if upper is None else upper if old_upper is None else min(upper, old_upper),
        )
        self._prepared = None

    def implies(self, condition: sympy.Basic, without: Iterable[sympy.Basic] = ()) -> bool:
        """Return whether ``condition`` holds wherever all facts hold. ``False`` may also mean "not proved".

        Args:
            without: facts not to use.
        """
        left_out = frozenset(without)
        if condition in self._conditions and condition not in left_out:
            return True
        if self._prepared is None:
            self._prepared = self._prepare(self._conditions)
        facts = self._prepared.without(left_out)
        if facts is None:
            facts = self._prepare(other for other in self._conditions if other not in left_out)
        return facts.implies(condition, self._effort)

    def _prepare(self, conditions: Iterable[sympy.Basic]) -> _Prepared:
        """Rewrite the facts over symbols whose sympy assumptions match the facts,
        with ``k*t`` for multiples of ``k``.

        With ``k*t``, sympy and torch's functions simplify divisions by themselves.
        """
        conditions = list(conditions)
        plain = _SymbolReplacement(self._bounds, {})
        divisors: dict[sympy.Basic, int] = {}
        divisibilities: set[sympy.Basic] = set()
        for condition in conditions:
            match plain(condition):
                case sympy.Eq(args=((_t.Mod() | _t.PythonMod()) as remainder, sympy.Integer(p=0))):
                    base, divisor = remainder.args
                    if base in plain.originals and isinstance(divisor, sympy.Integer):
                        symbol = plain.originals[base]
                        divisibilities.add(condition)
                        divisors[symbol] = lcm(divisors.get(symbol, 1), int(divisor))
        rename = _SymbolReplacement(self._bounds, divisors) if divisors else plain
        system = _System()
        for symbol in self._bounds:
            system.bound(rename.symbol_for(symbol), *rename.bounds_of(symbol))
        for condition in conditions:
            system.add(rename(condition), condition)
        return _Prepared(system, rename, frozenset(divisibilities))


@dataclass(frozen=True)
class _Prepared:
    """Facts as clauses, possibly without some of them."""

    system: _System
    rename: _SymbolReplacement
    divisibilities: frozenset[sympy.Basic]
    left_out: frozenset[sympy.Basic] = frozenset()

    def without(self, facts: frozenset[sympy.Basic]) -> _Prepared | None:
        """Return the same without some facts; ``None`` if one of them was used to rewrite the others."""
        if not facts.isdisjoint(self.divisibilities):
            return None
        return replace(self, left_out=self.left_out | facts)

    def implies(self, condition: sympy.Basic, effort: Effort) -> bool:
        return self.system.implies(self.rename(condition), self.left_out, effort)


class _SymbolReplacement:
    """Replaces torch's symbols, in normalized conditions, by symbols whose assumptions are facts."""

    def __init__(self, bounds: Mapping[sympy.Basic, Bounds], divisors: Mapping[sympy.Basic, int]) -> None:
        self._bounds, self._divisors = bounds, divisors
        self._replacements: dict[sympy.Basic, sympy.Basic] = {}
        self.originals: dict[sympy.Basic, sympy.Basic] = {}

    def __call__(self, condition: sympy.Basic) -> sympy.Basic:
        images = {symbol: self._replacement_of(symbol) for symbol in condition.free_symbols}
        return normalize(condition.xreplace(images), lambda symbol: bool(symbol.is_positive))

    def _replacement_of(self, symbol: sympy.Basic) -> sympy.Basic:
        found = self._replacements.get(symbol)
        if found is None:
            lower, _ = self.bounds_of(symbol)
            assumed = {"integer": True} if symbol.is_integer else {"real": True}
            if lower is not None and lower >= 0:
                assumed["positive" if lower > 0 else "nonnegative"] = True
            divisor = self._divisors.get(symbol, 1)
            made = sympy.Symbol(f"{symbol}/{divisor}" if divisor > 1 else str(symbol), **assumed)
            self.originals[made] = symbol
            found = self._replacements[symbol] = divisor * made
        return found

    def symbol_for(self, symbol: sympy.Basic) -> sympy.Basic:
        """Return the expression that replaces a symbol, without its divisor."""
        return self._replacement_of(symbol) / self._divisors.get(symbol, 1)

    def bounds_of(self, symbol: sympy.Basic) -> Bounds:
        """Return the bounds of the symbol that replaces a symbol."""
        lower, upper = self._bounds.get(symbol, (None, None))
        divisor = self._divisors.get(symbol, 1)
        lower = None if lower is None else -(-lower // divisor)
        upper = None if upper is None else upper // divisor
        return lower, upper


@dataclass(frozen=True)
class _Clause:
    """Conjunctions, one of which holds; ``origin`` is the fact that says so,
    ``None`` for what always holds."""

    alternatives: tuple[Conjunction, ...]
    symbols: frozenset[sympy.Basic]
    origin: sympy.Basic | None = None


class _System:
    """Clauses over linear forms, and the search for a contradiction among them."""

    def __init__(self) -> None:
        self._linearizer = Linearizer()
        self._clauses: list[_Clause] = []
        self._bounds: dict[sympy.Basic, Bounds] = {}
        self._defined: set[sympy.Basic] = set()

    def add(self, condition: sympy.Basic, origin: sympy.Basic | None = None) -> None:
        with suppress(NotLinear):  # such a condition implies nothing
            self._add(self._linearizer.alternatives(condition), origin)

    def bound(self, symbol: sympy.Basic, lower: int | None, upper: int | None) -> None:
        """Add bounds. Args: those of :meth:`Facts.bound`."""
        literals = _between({symbol: 1}, lower, upper)
        if literals:
            self._add((literals,))
        self._bounds[symbol] = (lower, upper)

    def _add(self, alternatives: tuple[Conjunction, ...], origin: sympy.Basic | None = None) -> None:
        symbols = _symbols(literal for part in alternatives for literal in part)
        self._clauses.append(_Clause(alternatives, frozenset(symbols), origin))

    def implies(self, condition: sympy.Basic, left_out: frozenset[sympy.Basic], effort: Effort) -> bool:
        """Return whether the clauses prove a condition. Args: the condition, facts not to use,
        and the proof's budget."""
        try:
            refuted = self._linearizer.alternatives(condition, truth=False)
        except NotLinear:
            return False
        self._add_definitions()
        effort.start()
        return all(self._excludes(conjunction, left_out, effort) for conjunction in refuted)

    def _add_definitions(self) -> None:
        """Add the facts about the terms and products that have occurred."""
        for term, clauses in list(self._linearizer.definitions.items()):
            if term not in self._defined:
                self._defined.add(term)
                for clause in clauses:
                    self._add(clause)
        for term in list(self._linearizer.products):
            if term not in self._defined:
                self._defined.add(term)
                for literals in self._product_facts(term):
                    self._add((literals,))

    def _excludes(self, conjunction: Conjunction, left_out: frozenset[sympy.Basic], effort: Effort) -> bool:
        """Return whether the conjunction contradicts the clauses."""
        relevant = self._relevant_clauses(conjunction, left_out)
        fixed = [*conjunction, *(literal for clause in relevant if len(clause) == 1 for literal in clause[0])]
        branching = sorted((clause for clause in relevant if len(clause) != 1), key=len)
        return _refute(fixed, branching[:_MAX_BRANCHING], effort)

    def _relevant_clauses(
        self, conjunction: Conjunction, left_out: frozenset[sympy.Basic]
    ) -> list[tuple[Conjunction, ...]]:
        """Return the clauses that share symbols with a conjunction,
        directly or through others, nearest first."""
        reached = _symbols(conjunction)
        pending = [clause for clause in self._clauses if clause.origin not in left_out]
        chosen: list[_Clause] = []
        while len(chosen) < _MAX_CLAUSES:
            near = [
                clause for clause in pending if not clause.symbols.isdisjoint(reached) or not clause.symbols
            ]
            if not near:
                break
            near.sort(key=lambda clause: len(clause.symbols - reached))
            chosen += near
            taken = set(map(id, near))
            pending = [clause for clause in pending if id(clause) not in taken]
            reached = reached.union(*(clause.symbols for clause in near))
        return [clause.alternatives for clause in chosen[:_MAX_CLAUSES]]

    def _product_facts(self, term: sympy.Basic) -> Iterator[Conjunction]:
        """Yield ``(x - low_x) * (y - low_y) >= 0`` and similar facts, for each way to split off a factor."""
        yield _between({term: 1}, *self._bounds_of(term))
        for factor in set(factors_of(term)):
            rest = term / factor
            low_x, high_x = self._bounds_of_factor(factor)
            low_y, high_y = self._bounds_of(rest)
            rest_form = self._linearizer.form(rest)
            for bound_x, bound_y, sign in (
                (low_x, low_y, 1),
                (high_x, high_y, 1),
                (low_x, high_y, -1),
                (high_x, low_y, -1),
            ):
                if bound_x is None or bound_y is None:
                    continue
                form = combine({term: 1}, rest_form, -bound_x)
                form = combine(combine(form, {factor: 1}, -bound_y), {ONE: bound_x * bound_y})
                yield (Literal.of(combine({}, form, sign)),)

    def _bounds_of_factor(self, factor: sympy.Basic) -> Bounds:
        """Return the bounds of a symbol, or of its quotient by a number."""
        if (
            isinstance(factor, _t.FloorDiv)
            and isinstance(factor.args[1], sympy.Integer)
            and factor.args[1] > 0
        ):
            low, high = self._bounds.get(factor.args[0], (None, None))
            divisor = int(factor.args[1])
            return None if low is None else low // divisor, None if high is None else high // divisor
        return self._bounds.get(factor, (None, None))

    def _bounds_of(self, term: sympy.Basic) -> Bounds:
        """Return the bounds of a product of symbols that are all known to be nonnegative."""
        lower, upper = 1, 1
        unbounded = False
        for factor in factors_of(term):
            low, high = self._bounds_of_factor(factor)
            if isinstance(factor, sympy.Integer):
                low = high = int(factor)
            if low is None or low < 0:
                return None, None
            lower *= low
            unbounded = unbounded or high is None
            upper *= high or 0
        return lower, None if unbounded else upper


def _between(form: Form, lower: int | None, upper: int | None) -> Conjunction:
    literals = []
    if lower is not None:
        literals.append(Literal.of(combine(form, {ONE: -lower} if lower else {})))
    if upper is not None:
        literals.append(Literal.of(combine({ONE: upper} if upper else {}, form, -1)))
    return tuple(literals)


def _refute(fixed: list[Literal], branching: list[tuple[Conjunction, ...]], effort: Effort) -> bool:
    """Return whether the literals contradict each other, whichever alternative of each clause is added."""
    if has_no_solution(fixed, effort):
        return True
    if not branching or not effort.spend(1):
        return False
    first, *others = branching
    return all(_refute([*fixed, *alternative], others, effort) for alternative in first)


def _symbols(literals: Iterable[Literal]) -> set[sympy.Basic]:
    found: set[sympy.Basic] = set()
    for literal in literals:
        for atom, _ in literal.terms:
            found |= atom.free_symbols
    return found
