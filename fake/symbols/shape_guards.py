"""The guards of an environment: a minimal equivalent set, each with its reasons, as data and one function.

A graph that was traced for some sizes may be used for others exactly if the guards hold. They are

- *relations* between sizes that an operator or the program asked for;
- *ties* of one number of the inputs to others (a stride to a size, a size to another one);
- *ranges* of the numbers that remain free.

:func:`guards_of` collects them, and drops each one that the others imply
(:mod:`fake.symbols.implications` proves it).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fake.errors import ShapeEnvError
from fake.seam import symbolic_shapes as _t
from fake.symbols.divisors import without_divisions
from fake.symbols.expr import normalize
from fake.symbols.implications import Facts
from fake.symbols.range_guards import Range, drop_implied_by_values, tightened_ranges
from fake.symbols.reasons import Reason, reasons_of
from fake.symbols.terms import Property, Terms, argument_names, properties_of, text_of_source
from fake.wrong_arguments import check_type

_LONGEST_CHAIN = 24


@dataclass(frozen=True)
class Guard:
    """One condition on the inputs.

    Attributes:
        expression: the condition in the user's terms, such as ``x.size(0) == 4``.
        kind: ``"relation"``, ``"equality"`` (two numbers tied by the questions asked about them), ``"duck"``
            (tied because they were equal in the example), ``"specialized"`` (to a constant), ``"layout"`` (a
            stride or an offset), or ``"range"``.
        condition: the condition in the environment's symbols; for ties, the number is ``tied``'s expression.
        reasons: who asked, earliest first; empty for ducks, layouts and ranges that nobody asked for.
        tied: the input's number that the guard is about; ``None`` for relations and ranges.
    """

    expression: str
    kind: str
    condition: sympy.Basic
    reasons: tuple[Reason, ...] = ()
    tied: Property | None = None

    def __str__(self) -> str:
        return self.expression


@dataclass(frozen=True)
class CompiledGuards:
    """A function that checks whether a graph may be used for given inputs.

    Attributes:
        code: the source of the function.
        inputs: the inputs that its arguments stand for, in order.
        ranks: the number of dimensions of each input that is a tensor.
    """

    code: str
    inputs: tuple[str, ...]
    function: Callable[..., bool]
    ranks: Mapping[str, int]

    def __call__(self, *inputs: Any) -> bool:
        """Return whether the guards hold. Takes tensors (or numbers, for inputs that
        are numbers) in order of ``inputs``.

        Raises:
            ArgumentTypeError: an argument is not a tensor, but the guards are about a tensor.
        """
        for name, value in zip(
            self.inputs, inputs, strict=False
        ):  # the call itself raises for a wrong number of them
            if (rank := self.ranks.get(name)) is not None:
                check_type("guards", name, value, torch.Tensor, "a tensor")
                if value.dim() != rank:
                    return False
        return self.function(*inputs)


class Guards(tuple[Guard, ...]):
    """The minimal guards of an environment at one moment.

    Attributes:
        shape_env: the environment that they belong to.
        statics: sizes, strides and offsets that were constants from the start: they have to match, but
            nothing specialized them.
    """

    shape_env: Any
    statics: tuple[Guard, ...]
    _terms: Terms

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no guards"

    def text(self, condition: sympy.Basic) -> str:
        """Format a condition in the user's terms, as it was when it was asked:
        no symbol is replaced by another."""
        return self._terms.doprint(condition)

    def compile(self, *, static: bool = True) -> CompiledGuards:
        """Compile all guards (and, with ``static``, all constant sizes) to one Python
        function of the inputs."""
        # Ranges first: later checks may divide by numbers that the ranges keep from being zero.
        guards = sorted(self, key=lambda guard: guard.kind != "range")
        checks = [*(self.statics if static else ()), *guards]
        properties = properties_of(self.shape_env)
        inputs = tuple(dict.fromkeys(p.root for p in properties))
        names = argument_names(inputs)
        texts, needed = _bindings(self.shape_env, properties)
        local: dict[sympy.Basic, str] = {symbol: f"_{symbol.name}" for symbol in texts}
        used = set().union(
            *(g.condition.free_symbols for g in checks),
            *(g.tied.expression.free_symbols for g in checks if g.tied is not None),
        )
        printer = Terms(local)
        lines = [
            f"    {local[s]} = {p.code.format(root=names[p.root])}" for s, p in needed.items() if s in used
        ]
        conditions = [_guard_code(guard, printer, names) for guard in checks]
        body = "\n        and ".join(conditions) or "True"
        code = "\n".join(
            (
                f"def accepts({', '.join(names.values())}):",
                *lines,
                f"    try:\n        return bool({body})",
                "    except ZeroDivisionError:  # nobody can tell what the program would have done",
                "        return False",
            )
        )
        namespace: dict[str, Any] = {**_t.SYMPY_INTERP, "math": math}
        exec(compile(code, "<guards>", "exec"), namespace)
        ranks = {p.root: 0 for p in properties if p.kind != "number"}
        for p in properties:
            if p.kind == "size":
                ranks[p.root] += 1
        return CompiledGuards(code, inputs, namespace["accepts"], ranks)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the guards as plain data."""
        return [
            {
                "expression": guard.expression,
                "kind": guard.kind,
                "asked": [
                    {"operator": reason.operator, "where": reason.where and str(reason.where)}
                    for reason in guard.reasons
                ],
            }
            for guard in self
        ]


def _guard_code(guard: Guard, printer: Terms, names: dict[str, str]) -> str:
    if guard.tied is None:
        return f"({printer.doprint(guard.condition)})"
    return (
        f"({guard.tied.code.format(root=names[guard.tied.root])} == {printer.doprint(guard.tied.expression)})"
    )


def _bindings(
    shape_env: Any, properties: Sequence[Property]
) -> tuple[dict[sympy.Basic, str], dict[sympy.Basic, Property]]:
    """Return, for each free symbol, its name in the user's terms,
    and the number of the inputs that is its value."""
    bound: dict[sympy.Basic, Property] = {}
    for p in properties:
        if isinstance(p.expression, sympy.Symbol):
            bound.setdefault(p.expression, p)
            if shape_env.source_to_var.get(bound[p.expression].source.name) != p.expression and (
                shape_env.source_to_var.get(p.source.name) == p.expression
            ):
                bound[p.expression] = p  # the number that the symbol was created for
    return {symbol: p.text for symbol, p in bound.items()}, bound


def guards_of(shape_env: Any) -> Guards:
    """Return the minimal guards of a shape environment, torch's or ours, as of now.

    Raises:
        ShapeEnvError: the argument is something else, such as a function or a mode.

    >>> import torch, fake
    >>> mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    >>> x = mode.from_tensor(torch.zeros(6, 5), name="x", dims={0: "dynamic"})
    >>> y = x.view(-1, 3, 5)
    >>> print(fake.guards_of(mode.shape_env))
    x.size(0) % 3 == 0
    2 <= x.size(0)
    """
    if not isinstance(shape_env, _t.TorchShapeEnv):
        raise ShapeEnvError(
            f"guards are those of a shape environment, such as mode.shape_env, and this is a {type(shape_env).__name__}"
        )
    properties = properties_of(shape_env)
    texts, bound = _bindings(shape_env, properties)
    originals = {s: text_of_source(sources[0]) for s, sources in shape_env.var_to_sources.items() if sources}
    terms = Terms({**originals, **texts})
    reasons = reasons_of(shape_env)
    ties, statics = _tied_and_constant(shape_env, properties, bound, terms, reasons)
    minimal, ranges = _minimal(shape_env, list(shape_env.guards), _ranges(shape_env, bound))
    relations, merged = merge_strict(minimal)
    found = Guards(
        (
            *ties,
            *(
                _relation_guard(c, [guard, merged.get(c, guard)], terms, reasons)
                for c, guard in relations.items()
            ),
            *(_range_guard(shape_env, bounds, terms, reasons) for bounds in ranges),
        )
    )
    found.shape_env, found.statics, found._terms = shape_env, tuple(statics), Terms({**texts, **originals})
    return found


def _tied_and_constant(
    shape_env: Any,
    properties: Sequence[Property],
    bound: dict[sympy.Basic, Property],
    terms: Terms,
    reasons: Sequence[Reason],
) -> tuple[list[Guard], list[Guard]]:
    """Return guards for the numbers of the inputs that are not free: tied to others, or constant."""
    ties: list[Guard] = []
    statics: list[Guard] = []
    for p in properties:
        if bound.get(p.expression) is p:
            continue
        text = f"{p.text} == {terms.doprint(p.expression)}"
        symbol = shape_env.source_to_var.get(p.source.name)
        causes: tuple[Reason, ...] = ()
        first = bound.get(p.expression)
        if symbol is None:
            kind = "layout"
        elif symbol == p.expression and first is not None:
            kind = "duck" if p.kind == "size" else "layout"
        else:
            kind = "specialized" if p.expression.is_number else "equality"
            causes = forcing_reasons(shape_env, sympy.Eq(symbol, p.expression, evaluate=False), reasons)
        guard = Guard(text, kind, sympy.true, causes, p)
        (statics if p.expression.is_number and symbol is None else ties).append(guard)
    return ties, statics


def _ranges(shape_env: Any, symbols: Iterable[sympy.Basic]) -> list[Range]:
    found = []
    for symbol in symbols:
        lower, upper = _t.concrete_bounds(shape_env, symbol)
        if lower is not None or upper is not None:
            found.append(Range(symbol, lower, upper))
    return found


def minimal_guards(shape_env: Any) -> list[Any]:
    """Return guard records equivalent, together with the ranges, to an environment's own:
    fewer, and simpler."""
    return [guard._replace(expr=condition) for condition, guard in minimal_relations(shape_env).items()]


def minimal_relations(shape_env: Any) -> dict[sympy.Basic, Any]:
    """Return the minimal conditions, simplified, each with the record that it comes from."""
    return merge_strict(_minimal(shape_env, list(shape_env.guards), None)[0])[0]


_STRICT = {sympy.Le: sympy.Lt, sympy.Ge: sympy.Gt}


def merge_strict(
    conditions: Mapping[sympy.Basic, Any],
) -> tuple[dict[sympy.Basic, Any], dict[sympy.Basic, Any]]:
    """Merge pairs of conditions: ``a <= b`` and ``a != b`` become ``a < b``.
    Slices with symbolic bounds ask for both.

    Returns the conditions, and for each merged one the mapping's value for the ``!=`` that it absorbed.

    >>> a, b = sympy.symbols("a b", integer=True)
    >>> merge_strict({a <= b: "first", sympy.Ne(b, a): "second"})
    ({a < b: 'first'}, {a < b: 'second'})
    """
    unequal = {
        frozenset(condition.args): condition for condition in conditions if isinstance(condition, sympy.Ne)
    }
    found: dict[sympy.Basic, Any] = {}
    merged: dict[sympy.Basic, Any] = {}
    gone: set[sympy.Basic] = set()
    for condition, owner in conditions.items():
        partner = unequal.get(frozenset(condition.args)) if type(condition) in _STRICT else None
        if partner is None:
            found[condition] = owner
            continue
        strict = _STRICT[type(condition)](*condition.args)
        found[strict], merged[strict] = owner, conditions[partner]
        gone.add(partner)
    return {condition: owner for condition, owner in found.items() if condition not in gone}, merged


def _minimal(
    shape_env: Any, guards: list[Any], ranges: list[Range] | None
) -> tuple[dict[sympy.Basic, Any], list[Range]]:
    """Drop, one by one, each condition that follows from the remaining ones.

    Args:
        ranges: the ranges that may be dropped too; ``None`` if all of them will be checked anyway.

    Returns:
        The remaining conditions, simplified, each with its record; and the remaining ranges.
    """
    relations: dict[sympy.Basic, Any] = {}
    for guard in guards:
        if _t.evaluate_by_ranges(shape_env, guard) is None:
            relations.setdefault(_simplify(shape_env, guard.expr), guard)
    least = {symbol: _t.concrete_bounds(shape_env, symbol)[0] or 0 for symbol in shape_env.var_to_range}
    relations = without_divisions(relations, lambda symbol: least.get(symbol, 0))
    relations = drop_implied_by_values(relations)
    symbols = set().union(*(condition.free_symbols for condition in relations))
    if ranges is not None:
        ranges = tightened_ranges(relations, ranges)
    all_ranges = _ranges(shape_env, symbols) if ranges is None else ranges
    facts = _facts(relations, all_ranges)
    for condition in sorted(relations, key=sympy.count_ops, reverse=True):
        if facts.implies(condition, without=[condition]):
            facts.remove(condition)
            del relations[condition]
    remaining = list(ranges or ())
    if relations:
        for bounds in list(remaining):
            others = [other for other in remaining if other is not bounds]
            if bounds.follows_from(_facts(relations, others)):
                remaining.remove(bounds)
    return relations, remaining


def _simplify(shape_env: Any, condition: sympy.Basic) -> sympy.Basic:
    simplified = shape_env.simplify(condition)
    least = {s: _t.concrete_bounds(shape_env, s)[0] or 0 for s in simplified.free_symbols}
    found = normalize(simplified, lambda term: _is_positive(term, least))
    return simplified if isinstance(found, sympy.logic.boolalg.BooleanAtom) else found


def _is_positive(term: sympy.Basic, least: Mapping[sympy.Basic, int]) -> bool:
    if isinstance(term, _t.FloorDiv) and isinstance(term.args[1], sympy.Integer) and term.args[1] > 0:
        return least.get(term.args[0], 0) >= term.args[1]
    return least.get(term, 0) >= 1


def _facts(conditions: Iterable[sympy.Basic], ranges: Iterable[Range]) -> Facts:
    facts = Facts()
    for bounds in ranges:
        bounds.bound(facts)
    for condition in conditions:
        facts.add(condition)
    return facts


def _relation_guard(
    condition: sympy.Basic, records: Sequence[Any], terms: Terms, reasons: Sequence[Reason]
) -> Guard:
    causes = tuple(reason for reason in reasons if any(reason.condition == record.expr for record in records))
    is_constant = isinstance(condition, sympy.Eq) and condition.lhs.is_Symbol and condition.rhs.is_Integer
    return Guard(terms.doprint(condition), "specialized" if is_constant else "relation", condition, causes)


def _range_guard(shape_env: Any, bounds: Range, terms: Terms, reasons: Sequence[Reason]) -> Guard:
    name = terms.doprint(bounds.symbol)
    left = "" if bounds.lower is None else f"{bounds.lower} <= "
    right = "" if bounds.upper is None else f" <= {bounds.upper}"
    causes: list[Reason] = []
    for condition in Range(bounds.symbol, *_t.concrete_bounds(shape_env, bounds.symbol)).conditions():
        if not _initial_facts(shape_env, bounds.symbol).implies(condition):
            causes += [r for r in forcing_reasons(shape_env, condition, reasons) if r not in causes]
    raised_by = [record.expr for record in bounds.records]
    causes += [r for r in reasons if r.condition in raised_by and r not in causes]
    both = sympy.And(*bounds.conditions(), evaluate=False)
    return Guard(f"{left}{name}{right}", "range", both, tuple(causes))


def _initial_facts(shape_env: Any, *symbols: sympy.Basic) -> Facts:
    """Return the facts that hold for symbols before any guard."""
    facts = Facts()
    for symbol in symbols:
        if symbol in _t.hints_of(shape_env) and symbol.is_positive:
            facts.bound(symbol, lower=2 if shape_env.specialize_zero_one else 0)
    return facts


def forcing_reasons(shape_env: Any, condition: sympy.Basic, reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Return the fewest reasons, taken in order, that together force a condition.

    If that cannot be proved, return all reasons that mention the condition's symbols.

    Args:
        shape_env: the environment.
        condition: the forced condition.
        reasons: the guards and their causes, in the order of recording.
    """
    reached, connected = set(condition.free_symbols), list[Reason]()
    for _ in range(_LONGEST_CHAIN):
        connected = [reason for reason in reasons if reason.condition.free_symbols & reached]
        extended = reached.union(*(reason.condition.free_symbols for reason in connected))
        if extended == reached:
            break
        reached = extended

    facts = _initial_facts(shape_env, *reached)
    for reason in connected:
        facts.add(reason.condition)

    def forced_by(chosen: Sequence[Reason]) -> bool:
        used = {reason.condition for reason in chosen}
        return facts.implies(condition, [r.condition for r in connected if r.condition not in used])

    if not forced_by(connected):
        return tuple(r for r in reasons if r.condition.free_symbols & condition.free_symbols)
    count = bisect_left(range(len(connected)), True, key=lambda size: forced_by(connected[:size]))
    candidates = connected[:count]
    for reason in candidates[-2 : -_LONGEST_CHAIN - 2 : -1]:  # the last one is always needed
        others = [other for other in candidates if other is not reason]
        if forced_by(others):
            candidates = others
    return tuple(candidates)
