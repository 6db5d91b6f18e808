"""Conditions told with ``s = k*t`` mean what they meant, at all sizes of a box."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings, strategies as st

import fake
from fake.seam.symbolic_shapes import FloorDiv, Max, Mod
from fake.symbols.divisors import without_divisions

A, B = sympy.symbols("a b", integer=True, positive=True)
LEAVES = st.sampled_from([A, B, *map(sympy.Integer, (1, 2, 3, 4))])


def _division(kind: Any) -> Any:
    def make(parts: tuple[Any, Any]) -> Any:
        base, divisor = parts
        return kind(base, divisor if divisor != 0 else sympy.Integer(2))

    return make


TERMS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.tuples(parts, parts).map(lambda p: p[0] * p[1]),
        st.tuples(parts, parts).map(lambda p: p[0] + p[1]),
        st.tuples(parts, parts).map(lambda p: Max(*p)),
        st.tuples(parts, st.sampled_from([A, B, FloorDiv(A, 2), *map(sympy.Integer, (2, 3, 4))])).map(_division(FloorDiv)),
        st.tuples(parts, st.sampled_from([A, B, FloorDiv(A, 2), A * B, *map(sympy.Integer, (2, 3, 4))])).map(_division(Mod)),
    ),
    max_leaves=5,
)  # fmt: skip
RELATIONS = st.sampled_from([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Ge])
DIVISIBLE = st.tuples(st.sampled_from([A, B]), st.sampled_from([2, 3, 4, 6])).map(
    lambda p: sympy.Eq(Mod(*p), 0)
)
EXCLUDED = st.tuples(st.sampled_from([A, B]), st.integers(2, 12)).map(lambda p: sympy.Ne(p[0], p[1]))
CONDITIONS = st.lists(
    st.one_of(DIVISIBLE, EXCLUDED, st.tuples(RELATIONS, TERMS, TERMS).map(lambda p: p[0](p[1], p[2]))),
    min_size=1,
    max_size=4,
)


def holds(conditions: Any, a: int, b: int) -> bool:
    return all(bool(c.xreplace({A: sympy.Integer(a), B: sympy.Integer(b)})) for c in conditions)


@pytest.mark.slow
@settings(deadline=None, max_examples=250)
@given(CONDITIONS)
def test_the_same_sizes_are_accepted(conditions: list[Any]) -> None:
    conditions = [c for c in conditions if not isinstance(c, sympy.logic.boolalg.BooleanAtom)]
    told = without_divisions(dict.fromkeys(conditions), lambda symbol: 2)
    assert sum(map(sympy.count_ops, told)) <= sum(map(sympy.count_ops, conditions)) or len(told) < len(
        conditions
    )
    for a, b in itertools.product(range(2, 15), repeat=2):
        assert holds(conditions, a, b) == holds(told, a, b), (conditions, list(told), a, b)


def test_whether_one_can_be_split_is_a_question_about_one() -> None:
    """``1 % k``, which reshapes ask, is about ``k`` being 1; what is excluded already answers it, but not itself."""
    rows, columns = FloorDiv(A, 4), FloorDiv(B, 4)
    even = [sympy.Eq(Mod(A, 4), 0), sympy.Eq(Mod(B, 4), 0)]
    asked = [
        *even,
        sympy.Ne(Mod(1, rows), 0),
        sympy.Ne(B, 4),
        sympy.Ne(Mod(1, rows * columns, evaluate=False), 0),
    ]
    assert list(without_divisions(dict.fromkeys(asked), lambda symbol: 2)) == [
        *even,
        sympy.Ne(A, 4),
        sympy.Ne(B, 4),
    ]


def test_reshapes_into_tiles_ask_for_two_divisibilities() -> None:
    def patches(x: torch.Tensor) -> torch.Tensor:
        h, w, c = x.shape
        y = x.reshape(h // 2, 2, w // 2, 2, c).permute(0, 2, 1, 3, 4).reshape(-1, 4 * c)
        return y.reshape(h // 2, w // 2, 2, 2, c).permute(0, 2, 1, 3, 4).reshape(h, w, c)

    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    x = mode.from_tensor(torch.zeros(12, 8, 3), name="x")
    with mode:
        patches(x)
    relations = {str(guard) for guard in mode.shape_env.guards.minimal() if guard.kind == "relation"}
    assert {"x.size(0) % 2 == 0", "x.size(1) % 2 == 0"} <= relations
    assert len(relations) <= 6
    accepts = mode.shape_env.guards.compile()
    assert accepts(torch.zeros(20, 14, 5))
    assert not accepts(torch.zeros(20, 13, 5))
