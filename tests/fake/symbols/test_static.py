"""What ranges say in plain numbers is what torch's environment finds with sympy."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fake import ShapeEnv
from fake.cache.expressions import decode, encode
from fake.symbols._torch import LocalSource
from fake.symbols.static import static_answer


def environment(bounds: list[tuple[int, int | None]]) -> tuple[Any, list[sympy.Symbol]]:
    shape_env = ShapeEnv(duck_shape=False)
    symbols = []
    for place, (lower, span) in enumerate(bounds):
        symbol = shape_env.create_symbol(lower, source=LocalSource(f"n{place}"))
        shape_env.constrain_symbol_range(symbol, lower, sympy.oo if span is None else lower + span)
        symbols.append(symbol)
    return shape_env, symbols


BOUNDS = st.lists(st.tuples(st.integers(2, 6), st.none() | st.integers(0, 5)), min_size=2, max_size=3)
LEAVES = st.integers(-1, 40) | st.integers(0, 2).map(lambda number: ("s", number))
EXPRESSIONS = st.recursive(
    LEAVES, lambda parts: st.tuples(st.sampled_from(["Add", "Mul"]), parts, parts), max_leaves=5
)
RELATIONS = (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


@settings(deadline=None, max_examples=300)
@given(BOUNDS, EXPRESSIONS, EXPRESSIONS, st.sampled_from(RELATIONS))
def test_as_torchs_environment_says(bounds: Any, left: Any, right: Any, relation: Any) -> None:
    shape_env, symbols = environment(bounds)
    symbols = [*symbols, symbols[0]]
    condition = relation(decode(left, symbols), decode(right, symbols))
    answer = static_answer(condition, shape_env)
    if answer is not None:
        assert bool(shape_env._maybe_evaluate_static(condition)) == answer
        assert not shape_env.guards


def test_sizes_against_one_and_each_other() -> None:
    shape_env, (a, b) = environment([(2, None), (2, 3)])
    assert static_answer(sympy.Eq(a, 1), shape_env) is False
    assert static_answer(sympy.Ge(a * b, 4), shape_env) is True
    assert static_answer(sympy.Eq(a, b), shape_env) is None
    assert static_answer(sympy.Gt(a**2, 3), shape_env) is True
    assert static_answer(sympy.Lt(b, 6), shape_env) is True


@pytest.mark.parametrize("value", [0.5, 3.5])
def test_floats_and_unbacked_numbers_are_left_to_torch(value: float) -> None:
    shape_env = ShapeEnv()
    unbacked = shape_env.create_unbacked_symint().node.expr
    assert static_answer(sympy.Ge(unbacked, -1), shape_env) is None
    assert static_answer(sympy.Eq(shape_env.create_unbacked_symfloat().node.expr, value), shape_env) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(-3, 600))
def test_products_are_put_together_as_sympy_would(numbers: list[int], factor: int) -> None:
    symbols = [sympy.Symbol(f"s{7 * place}", integer=True, positive=True) for place in range(13)]
    product = sympy.Mul(factor, *[symbols[number] for number in numbers])
    encoded = encode(product, symbols.index)
    made = decode(encoded, symbols)
    assert made == product
    assert made.args == product.args
    assert hash(made) == hash(product)
    assert made.is_integer
    assert made.is_positive == product.is_positive
