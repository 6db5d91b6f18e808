"""Results of symbolic arithmetic that need no sympy: neutral elements, and sizes compared with zero."""

from __future__ import annotations

from typing import Any

import sympy

from fake import _torch as _t
from fake.symbols.answers import settle_answer

_NEUTRAL_ON_THE_RIGHT = {"add": 0, "sub": 0, "mul": 1, "int_floordiv": 1}
_NEUTRAL_ON_THE_LEFT = {"add": 0, "mul": 1}
_NEUTRAL_TRUTH = {"and_": True, "or_": False}
_AGAINST_ZERO = {"ge": True, "lt": False}


def shortcut(name: str, left: Any, right: Any, state: Any) -> Any:
    """The node of ``left NAME right`` for canonical integer nodes, or None where sympy has to say it.

    Args:
        state: what is remembered for the environment (``fake.symbols.node.LeanState``).
    """
    neutral = _NEUTRAL_TRUTH.get(name)
    if neutral is not None:
        if left.constant is neutral and right.pytype is bool:
            return right
        return left if right.constant is neutral and left.pytype is bool else None
    if right.constant is not None:
        number = right.constant
        if number.__class__ is int and left.pytype is int:
            if _NEUTRAL_ON_THE_RIGHT.get(name) == number:
                return left
            if number == 0 and name in _AGAINST_ZERO and _is_size(left):
                return truth(_AGAINST_ZERO[name], left, state)
    elif (
        left.constant.__class__ is int
        and right.pytype is int
        and _NEUTRAL_ON_THE_LEFT.get(name) == left.constant
    ):
        return right
    return None


def _is_size(node: Any) -> bool:
    """Whether an expression is a sum of products of numbers and symbols that are not negative."""
    known = node.__dict__.get("_is_size")
    if known is None:
        known = node.__dict__["_is_size"] = _not_negative(node.expr)
    return known


def _not_negative(expr: Any) -> bool:
    if expr.is_Symbol:
        return bool(expr.is_positive or expr.is_nonnegative)
    if expr.is_Integer:
        return expr.p >= 0
    if expr.is_Add or expr.is_Mul:
        return all(map(_not_negative, expr.args))
    return False


def truth(value: bool, asked: Any, state: Any) -> Any:
    """The one node of an environment that is true (or false), with its answers known.

    Args:
        value: which one.
        asked: a node of the environment, whose class the answer has.
        state: what is remembered of the environment.
    """
    expr = sympy.true if value else sympy.false
    node = state.canonical.get((expr, bool, True))
    if node is None:
        node = _t.SymNode(expr, asked.shape_env, bool, value)
        node.__class__ = asked.__class__
        node.__dict__.update(_canonical=node, _answer=value, _evaluated=expr)
        settle_answer(node.__dict__, value)
        state.canonical[expr, bool, True] = node
    return node
