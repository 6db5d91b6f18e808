"""What is said to follow from facts does follow: checked against all values of small boxes."""

from __future__ import annotations

import itertools
import operator

import pytest
import sympy
from hypothesis import given, settings, strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from fake.symbols.expr import ONE, Linearizer, Literal, NotLinear, normalize
from fake.symbols.implications import Facts
from fake.symbols.omega import has_no_solution

# torch makes sizes positive whether or not their range says so: the reasoning must not rely on it.
SYMBOLS = sympy.symbols("s0 s1 s2", integer=True, positive=True)
LOW, HIGH = 0, 9

small = st.integers(-6, 12)
divisors = st.integers(1, 6)


def _expressions():
    leaves = st.one_of(st.sampled_from(SYMBOLS), small.map(sympy.Integer))

    def extend(inner):
        return st.one_of(
            st.builds(operator.add, inner, inner),
            st.builds(operator.sub, inner, inner),
            st.builds(lambda k, e: k * e, st.integers(-3, 4), inner),
            st.builds(operator.mul, st.sampled_from(SYMBOLS), st.sampled_from(SYMBOLS)),
            st.builds(FloorDiv, inner, divisors.map(sympy.Integer)),
            st.builds(PythonMod, inner, divisors.map(sympy.Integer)),
            st.builds(Max, inner, inner),
            st.builds(Min, inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=4)


_RELATIONS = (sympy.Eq, sympy.Ne, sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)
_PYTHON = {
    sympy.Eq: operator.eq, sympy.Ne: operator.ne, sympy.Ge: operator.ge,
    sympy.Gt: operator.gt, sympy.Le: operator.le, sympy.Lt: operator.lt,
}  # fmt: skip

# The sides are kept apart, so that the values do not come from the sympy that evaluates the relation.
conditions = st.tuples(st.sampled_from(_RELATIONS), _expressions(), _expressions())
bounds = st.tuples(st.integers(LOW, 4), st.integers(4, HIGH))


def _value(expression, values):
    return int(sympy.sympify(expression).xreplace(values))


def _holds(condition, values):
    relation, left, right = condition
    return _PYTHON[relation](_value(left, values), _value(right, values))


def _as_sympy(condition):
    relation, left, right = condition
    return relation(left, right, evaluate=False)


def _box(ranges):
    for point in itertools.product(*(range(low, high + 1) for low, high in ranges)):
        yield dict(zip(SYMBOLS, map(sympy.Integer, point), strict=True))


def check_implications(ranges, known, goal):
    facts = Facts()
    for symbol, (low, high) in zip(SYMBOLS, ranges, strict=True):
        facts.bound(symbol, low, high)
    for condition in known:
        facts.add(_as_sympy(condition))
    if facts.implies(_as_sympy(goal)):
        for values in _box(ranges):
            if all(_holds(condition, values) for condition in known):
                assert _holds(goal, values), f"{goal} fails at {values} although all of {known} hold"


@pytest.mark.slow
@settings(derandomize=True, max_examples=120, deadline=None)
@given(st.tuples(bounds, bounds, bounds), st.lists(conditions, max_size=3), conditions)
def test_what_is_said_to_follow_holds_wherever_the_facts_hold(ranges, known, goal):
    check_implications(ranges, known, goal)


s, t, u = SYMBOLS


@pytest.mark.parametrize(
    ("known", "goal"),
    [
        ([sympy.Eq(Mod(s, 8), 0)], sympy.Eq(Mod(s, 4), 0)),
        ([sympy.Eq(Mod(s, 8), 0)], sympy.Eq(Mod(3 * s + 16, 8), 0)),
        ([sympy.Eq(Mod(s, 4), 0), sympy.Eq(Mod(s, 6), 0)], sympy.Eq(Mod(s, 12), 0)),
        ([sympy.Eq(Mod(s, 8), 0)], sympy.Eq(Mod(s * t, 8), 0)),
        ([sympy.Eq(Mod(s, 2), 0)], sympy.Eq(FloorDiv(s, FloorDiv(s, 2)), 2)),
        ([sympy.Eq(Mod(s, 2), 0)], sympy.Ne(s, 5)),
        ([sympy.Ge(s, t + 3)], sympy.Ne(s, t)),
        ([sympy.Ge(s, t), sympy.Ge(t, u)], sympy.Ge(s, u)),
        ([sympy.Ge(s, t), sympy.Le(s, t)], sympy.Eq(s, t)),
        ([sympy.Eq(s, 2 * t)], sympy.Eq(Mod(s, 2), 0)),
        ([sympy.Gt(3 * s, 10)], sympy.Ge(s, 4)),
        ([], sympy.Ge(s * t, 2 * t)),
        ([], sympy.Ge(s * t * u, 8)),
        ([], sympy.Eq(Max(1, s), s)),
        ([sympy.Gt(s, t)], sympy.Eq(Max(s, t), s)),
        ([], sympy.Le(FloorDiv(s, 2), s)),
        ([], sympy.Lt(Mod(s, 5), 5)),
        ([sympy.Or(sympy.Eq(s, 4), sympy.Eq(s, 6))], sympy.Eq(Mod(s, 2), 0)),
        ([sympy.Ne(s, 2), sympy.Ne(s, 3)], sympy.Ge(s, 4)),
        ([sympy.Ge(s, 5), sympy.Le(t, 4)], sympy.And(sympy.Ge(s, 3), sympy.Ne(s, t))),
        ([sympy.Eq(Mod(s * t, 2 * t), 0)], sympy.Eq(Mod(s, 2), 0)),
    ],
)  # fmt: skip
def test_what_follows_is_found(known, goal):
    facts = Facts()
    for symbol in SYMBOLS:
        facts.bound(symbol, lower=2)
    for condition in known:
        facts.add(condition)
    assert facts.implies(goal)


@pytest.mark.parametrize(
    ("known", "goal"),
    [
        ([], sympy.Ge(s, 1, evaluate=False)),
        ([sympy.Eq(Mod(s, 2), 0)], sympy.Ge(s, 2, evaluate=False)),
        ([sympy.Eq(Mod(s, 2), 0)], sympy.Eq(Mod(s, 4), 0)),
        ([sympy.Ge(s, t)], sympy.Ne(s, t)),
        ([sympy.Eq(Mod(s * t, 2 * t), 0)], sympy.Eq(Mod(s, 2), 0)),
    ],
)
def test_nothing_follows_from_what_sympy_assumes_of_sizes(known, goal):
    facts = Facts()
    for condition in known:
        facts.add(condition)
    assert not facts.implies(goal)


def test_conditions_over_floats_are_no_facts_and_do_not_follow():
    f = sympy.Symbol("f", real=True)
    facts = Facts()
    facts.add(sympy.Gt(f, 1))
    assert not facts.implies(sympy.Gt(f, 0))
    assert facts.implies(sympy.Gt(f, 1)), "a fact follows from itself"
    with pytest.raises(NotLinear):
        Linearizer().alternatives(sympy.Gt(f, 0))


@pytest.mark.parametrize(
    ("literals", "impossible"),
    [
        ([({s: 2, t: 4, ONE: -1}, True)], True),
        ([({s: 7, t: 12, u: 31, ONE: -17}, True), ({s: 3, t: 5, u: 14, ONE: -7}, True), ({s: 1, ONE: -1}, False), ({s: -1, ONE: 40}, False), ({t: 1, ONE: 50}, False), ({t: -1, ONE: 50}, False)], False),
        ([({s: 3, ONE: -4}, False), ({s: -3, ONE: 5}, False)], True),
        ([({s: 1}, False), ({s: -1, ONE: -1}, False)], True),
        ([({s: 1}, False)], False),
    ],
)  # fmt: skip
def test_systems_of_integers(literals, impossible):
    # The second system is the example of Pugh's paper, which has a solution in that box.
    assert has_no_solution([Literal.of(form, equal=equal) for form, equal in literals]) is impossible


@settings(derandomize=True, max_examples=100, deadline=None)
@given(conditions)
def test_a_normalized_condition_means_the_same(condition):
    original = _as_sympy(condition)
    found = normalize(original, lambda symbol: True)
    for values in _box(((1, 4), (1, 4), (1, 3))):
        holds = _holds((found.func, found.lhs, found.rhs), values) if found.args else bool(found)
        assert holds == _holds(condition, values), (original, found, values)
