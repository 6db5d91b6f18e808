"""Equalities recorded without sympy leave an environment as torch's own evaluation does."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fake import FakeTensorMode, ShapeEnv
from fake.symbols._torch import LocalSource, TorchShapeEnv
from fake.symbols.equality import Equalities


def environment(kind: type, hints: list[int]) -> tuple[Any, list[sympy.Symbol]]:
    shape_env = kind(duck_shape=False)
    return shape_env, [
        shape_env.create_symbol(hint, source=LocalSource(f"n{place}")) for place, hint in enumerate(hints)
    ]


def state(shape_env: Any, symbols: list[sympy.Symbol]) -> dict[str, Any]:
    return {
        "guards": [(str(guard.expr), guard.size_oblivious) for guard in shape_env.guards],
        "replacements": {str(symbol): str(shape_env.replace(symbol)) for symbol in symbols},
        "axioms": {str(key): str(value) for key, value in shape_env.axioms.items()},
        "ranges": {str(symbol): str(shape_env.var_to_range[symbol]) for symbol in symbols},
        "counts": {str(symbol): shape_env.symbol_guard_counter[symbol] for symbol in symbols},
        "key": shape_env._get_key(),
    }


@settings(deadline=None, max_examples=60)
@example(TorchShapeEnv, [4, 4, 4], [(0, 2), (1, 2), (0, 1)])  # the third follows from the others
@given(
    st.sampled_from([TorchShapeEnv, ShapeEnv]),
    st.lists(st.sampled_from([3, 4]), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_the_same_state_as_after_torchs_evaluation(
    kind: type, hints: list[int], pairs: list[tuple[int, int]]
) -> None:
    theirs, their_symbols = environment(kind, hints)
    ours, our_symbols = environment(kind, hints)
    for left, right in pairs:
        left, right = left % len(hints), right % len(hints)
        if hints[left] != hints[right]:
            continue
        asked = sympy.Eq(their_symbols[left], their_symbols[right])
        before = dict(theirs.replacements)
        theirs.evaluate_expr(asked)
        # Where torch replaces a replaced symbol by another one, it goes on with what it remembers of the first (its caches count
        # replacements): then what it does next depends on what it was asked before.
        assume(
            all(
                theirs.replacements[symbol] in (value, theirs.replace(value))
                for symbol, value in before.items()
            )
        )
        same = sympy.Eq(our_symbols[left], our_symbols[right])
        if not Equalities(ours).guard(same):
            ours.evaluate_expr(same)
    assert state(ours, our_symbols) == state(theirs, their_symbols)


def test_a_question_that_needs_more_is_declined() -> None:
    shape_env, (a, b, c) = environment(ShapeEnv, [4, 4, 5])
    assert not Equalities(shape_env).guard(sympy.Eq(a, c))  # different values
    assert not Equalities(shape_env).guard(sympy.Eq(a, 4))  # a specialisation
    assert not Equalities(shape_env).guard(sympy.Eq(a + 1, b + 1))
    shape_env.constrain_symbol_range(a, 2, 64)
    assert not Equalities(shape_env).guard(sympy.Eq(a, b))  # another range: it has to be narrowed
    with shape_env.suppress_guards():
        assert not Equalities(shape_env).guard(sympy.Eq(b, a))
    assert not shape_env.guards


def test_unbacked_sizes_are_declined() -> None:
    shape_env, (a,) = environment(ShapeEnv, [4])
    unbacked = shape_env.create_unbacked_symint().node.expr
    assert not Equalities(shape_env).guard(sympy.Eq(a, unbacked))


@pytest.mark.parametrize("number", [0, 1, 5])
def test_neutral_elements_are_the_number_itself(number: int) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.zeros(6, 5), name="x").shape[0]
    for result, expected in (
        (size * 1, 6),
        (1 * size, 6),
        (size + 0, 6),
        (0 + size, 6),
        (size - 0, 6),
        (size // 1, 6),
        (size + number, 6 + number),
        (size * number, 6 * number),
        (size >= number, number <= 6),
        (size < number, number > 6),
    ):
        value = result.node.hint if isinstance(result, (torch.SymInt, torch.SymBool)) else result
        assert value == expected
    assert (size * 1).node.expr == size.node.expr
    assert bool(size >= 0)
    assert not bool(size < 0)
    assert not any(guard.expr.free_symbols and "0" in str(guard.expr) for guard in mode.shape_env.guards)


def test_a_size_that_becomes_known_says_so_at_once() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.zeros(6, 5), name="x").shape[0]
    twice = size * 2
    for _ in range(3):
        assert size.node.maybe_as_int() is None
        assert twice.node.maybe_as_int() is None
    assert bool(size == 6)
    assert size.node.maybe_as_int() == 6
    assert twice.node.maybe_as_int() == 12
    assert (twice + 1).node.maybe_as_int() == 13
