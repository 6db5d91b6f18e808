"""Random arithmetic of sizes: every symbolic answer against plain integers, at all values of small ranges."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings, strategies as st
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, statically_known_true

import fake
from fake import Dim, FakeTensorMode, ShapeEnv

Term = Callable[[Any, Any], Any]
"""A function of two sizes, plain or symbolic."""

RANGES = {"a": (2, 7), "b": (3, 9)}
BINDINGS = list(itertools.product(*(range(low, high + 1) for low, high in RANGES.values())))


def _apply(function: Callable[..., Any], *terms: Term) -> Term:
    return lambda a, b: function(*[term(a, b) for term in terms])


def _ceil_div(x: Any, y: Any) -> Any:
    return -(-x // y)


def _divisor(term: Term) -> Term:
    """A number that is never zero."""
    return lambda a, b: torch.sym_max(term(a, b), 1)


def _leaf(name: str, number: int) -> tuple[str, Term]:
    leaves: dict[str, Term] = {"a": lambda a, b: a, "b": lambda a, b: b, "n": lambda a, b: number}
    return (str(number) if name == "n" else name), leaves[name]


leaves = st.builds(_leaf, st.sampled_from("aabbn"), st.integers(-3, 8))


def _extend(terms: st.SearchStrategy[tuple[str, Term]]) -> st.SearchStrategy[tuple[str, Term]]:
    def combine(name: str, left: tuple[str, Term], right: tuple[str, Term]) -> tuple[str, Term]:
        function, divides = OPERATIONS[name]
        second = _divisor(right[1]) if divides else right[1]
        return f"{name}({left[0]}, {right[0]})", _apply(function, left[1], second)

    def one(name: str, only: tuple[str, Term]) -> tuple[str, Term]:
        return f"{name}({only[0]})", _apply(FUNCTIONS[name], only[1])

    return st.builds(combine, st.sampled_from(sorted(OPERATIONS)), terms, terms) | st.builds(
        one, st.sampled_from(sorted(FUNCTIONS)), terms
    )


OPERATIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    "add": (operator.add, False),
    "sub": (operator.sub, False),
    "mul": (operator.mul, False),
    "floordiv": (operator.floordiv, True),
    "mod": (operator.mod, True),
    "ceildiv": (_ceil_div, True),
    "max": (torch.sym_max, False),
    "min": (torch.sym_min, False),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "square": lambda x: x**2,
    "halved": lambda x: math.floor(x / 2),
    "rounded up": lambda x: math.ceil(x / 3),
    "to float and back": lambda x: int(x) if isinstance(x, int) else torch.sym_int(torch.sym_float(x)),
}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}

terms = st.recursive(leaves, _extend, max_leaves=6)
conditions = st.tuples(st.sampled_from(sorted(COMPARISONS)), terms, terms)


def sizes(a: int, b: int) -> tuple[Any, Any, ShapeEnv]:
    shape_env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env)
    dims = {place: Dim(name, min=low, max=high) for place, (name, (low, high)) in enumerate(RANGES.items())}
    shape = mode.from_tensor(torch.empty(a, b), name="x", dims=dims).shape
    return shape[0], shape[1], shape_env


def value_at(value: Any, symbols: list[sympy.Symbol], binding: tuple[int, ...]) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymBool)):
        return value
    found = value.node.expr.xreplace(dict(zip(symbols, map(sympy.Integer, binding), strict=True)))
    # For sympy, the float zero is an integer: torch's functions keep it, and others do not compute with it.
    found = found.xreplace({zero: sympy.Integer(0) for zero in found.atoms(sympy.Float) if zero.is_zero})
    return bool(found) if isinstance(value, torch.SymBool) else int(found)


@settings(deadline=None, max_examples=150)
@given(terms, st.sampled_from(BINDINGS))
def test_values_and_ranges(term: tuple[str, Term], example: tuple[int, int]) -> None:
    a, b, shape_env = sizes(*example)
    symbols = [a.node.expr, b.node.expr]
    result = term[1](a, b)
    truth = {binding: term[1](*binding) for binding in BINDINGS}
    for binding, expected in truth.items():
        if all(guard_holds(shape_env, symbols, binding)):
            assert value_at(result, symbols, binding) == expected, (term[0], binding)
    if isinstance(result, torch.SymInt):
        assert result.node.hint == truth[example]
        bounds = shape_env.bound_sympy(result.node.expr)
        accepted = [t for binding, t in truth.items() if all(guard_holds(shape_env, symbols, binding))]
        assert bounds.lower <= min(accepted)
        assert max(accepted) <= bounds.upper


def guard_holds(shape_env: Any, symbols: list[sympy.Symbol], binding: tuple[int, ...]) -> list[bool]:
    """What the guards that an arithmetic operation itself left say of a binding."""
    numbers = dict(zip(symbols, map(sympy.Integer, binding), strict=True))
    return [bool(guard.expr.xreplace(numbers)) for guard in shape_env.guards]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(conditions, st.sampled_from(BINDINGS))
def test_answers_and_guards(
    condition: tuple[str, tuple[str, Term], tuple[str, Term]], example: tuple[int, int]
) -> None:
    name, left, right = condition
    holds = _apply(COMPARISONS[name], left[1], right[1])
    truth = {binding: bool(holds(*binding)) for binding in BINDINGS}
    a, b, shape_env = sizes(*example)
    asked = holds(a, b)
    symbols = [a.node.expr, b.node.expr]
    before = [binding for binding in BINDINGS if all(guard_holds(shape_env, symbols, binding))]
    if statically_known_true(asked):
        assert all(truth[binding] for binding in before)
    if statically_known_true(not asked if isinstance(asked, bool) else torch.sym_not(asked)):
        assert not any(truth[binding] for binding in before)
    assert bool(asked) == truth[example]
    # The guards accept exactly the sizes for which the answer, and what the arithmetic needed, is the same.
    accepts = fake.guards_of(shape_env).compile()
    for binding in BINDINGS:
        expected = binding in before and truth[binding] == truth[example]
        assert accepts(torch.empty(*binding)) == expected, (
            name,
            left[0],
            right[0],
            binding,
            str(shape_env.guards.minimal()),
        )


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(conditions, st.lists(conditions, max_size=2))
def test_unbacked_answers_hold_for_all_values_that_were_checked(
    condition: tuple[str, tuple[str, Term], tuple[str, Term]],
    facts: list[tuple[str, tuple[str, Term], tuple[str, Term]]],
) -> None:
    shape_env = ShapeEnv()
    FakeTensorMode(shape_env=shape_env)
    a, b = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    for size, (low, high) in zip((a, b), RANGES.values(), strict=True):
        torch._check(size >= low)
        torch._check(size <= high)
    possible = BINDINGS
    for name, left, right in facts:
        fact = _apply(COMPARISONS[name], left[1], right[1])
        still = [binding for binding in possible if fact(*binding)]
        if not still:
            return  # contradictory facts say anything
        try:
            torch._check(fact(a, b))
        except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
            return  # the arithmetic itself needed to know
        possible = still
    name, left, right = condition
    holds = _apply(COMPARISONS[name], left[1], right[1])
    truth = {bool(holds(*binding)) for binding in possible}
    try:
        asked = holds(a, b)
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
        return
    if statically_known_true(asked):
        assert truth == {True}, (name, left[0], right[0])
    if guard_or_false(asked):
        assert truth == {True}, (name, left[0], right[0])
    if not guard_or_true(asked):
        assert truth == {False}, (name, left[0], right[0])


def test_an_expression_in_which_sympy_recurses_without_end_stays_open() -> None:
    shape_env = ShapeEnv()
    FakeTensorMode(shape_env=shape_env)
    a, b = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
    for size, (low, high) in zip((a, b), RANGES.values(), strict=True):
        torch._check(size >= low)
        torch._check(size <= high)
    asked = -b % a == a
    assert not guard_or_false(asked)
    assert guard_or_true(asked)
    with pytest.raises(torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
        bool(asked)


def test_the_floor_of_a_negative_division_has_a_value() -> None:
    a, b, shape_env = sizes(2, 3)
    symbols = [a.node.expr, b.node.expr]
    halved = math.floor(-(-a // b) / 2)
    for binding in BINDINGS:
        if all(guard_holds(shape_env, symbols, binding)):
            assert value_at(halved, symbols, binding) == math.floor(-(-binding[0] // binding[1]) / 2)


def test_the_floor_of_a_division_by_a_negative_number_has_a_value() -> None:
    a, b, shape_env = sizes(2, 7)
    symbols = [a.node.expr, b.node.expr]
    whole = math.floor((b // -3) / 1)
    for binding in BINDINGS:
        if all(guard_holds(shape_env, symbols, binding)):
            assert value_at(whole, symbols, binding) == math.floor((binding[1] // -3) / 1)


def test_a_zero_that_was_a_float_twice():
    """torch cannot compare its range with another one: ``cannot determine truth value of Relational``."""
    a, _, shape_env = sizes(2, 3)
    zero = torch.sym_int(torch.sym_float(torch.sym_int(torch.sym_float(a % a))))
    assert not bool(a == zero)
    accepts = fake.guards_of(shape_env).compile()
    assert all(accepts(torch.empty(*binding)) for binding in BINDINGS)


def test_a_float_zero_is_the_integer() -> None:
    a, b, _ = sizes(2, 3)
    halved = math.floor(torch.sym_int(torch.sym_float(a % a)) / 2)
    assert value_at(halved, [a.node.expr, b.node.expr], (2, 3)) == 0
    assert halved.node.hint == 0
