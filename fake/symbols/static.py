"""Questions that the ranges of sizes answer, in plain numbers: ``s0 == 1`` of a size that is at least 2.

Most questions that operators ask are of this kind (is it empty, is it one, is it at least as long). torch's environment
answers them alike, by way of sympy, in fifty to a hundred microseconds; they leave no guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy

from fake import _torch as _t

_Bounds = tuple[float, float]
_RELATIONS: dict[Any, Callable[[_Bounds, _Bounds], bool | None]] = {
    sympy.Eq: lambda a, b: _not(_differ(a, b)),
    sympy.Ne: lambda a, b: _differ(a, b),
    sympy.Gt: lambda a, b: _is_less(b, a),
    sympy.Lt: lambda a, b: _is_less(a, b),
    sympy.Ge: lambda a, b: _not(_is_less(a, b)),
    sympy.Le: lambda a, b: _not(_is_less(b, a)),
}
_LARGEST = 2**53
"""Beyond, a float is no exact integer."""


def static_answer(expr: Any, shape_env: Any) -> bool | None:
    """Whether a comparison of sums and products of backed sizes holds, or None where their ranges do not say.

    >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
    >>> from torch._dynamo.source import LocalSource
    >>> env = ShapeEnv()
    >>> s = env.create_symbol(4, source=LocalSource("x"))
    >>> static_answer(sympy.Eq(s, 1), env), static_answer(sympy.Gt(4 * s, 8), env), static_answer(s * s + 1 > 4, env)
    (False, None, True)
    """
    relation = _RELATIONS.get(expr.__class__)
    if relation is None and (expr is sympy.true or expr is sympy.false):
        return expr is sympy.true
    if relation is None or shape_env.should_record_events or shape_env._translation_validation_enabled:
        return None
    left, right = expr.args
    first = _bounds(left, shape_env)
    second = None if first is None else _bounds(right, shape_env)
    return None if first is None or second is None else relation(first, second)


def _bounds(expr: Any, shape_env: Any) -> _Bounds | None:
    """The least and the greatest value of an expression; None for anything but sums and products of sizes."""
    if expr.is_Symbol:
        if not expr.is_integer or expr in shape_env.size_like or expr not in shape_env.backed_var_to_val:
            return None
        found = shape_env.var_to_range.get(expr)
        return None if found is None else (_number(found.lower), _number(found.upper))
    if expr.is_Integer:
        return (expr.p, expr.p) if -_LARGEST < expr.p < _LARGEST else None
    if expr.is_Pow and expr.exp.is_Integer and 0 < expr.exp.p < 8:
        found = _bounds(expr.base, shape_env)
        return (
            None
            if found is None or not found[0] >= 0
            else _exact(found[0] ** expr.exp.p, found[1] ** expr.exp.p)
        )
    if not (expr.is_Add or expr.is_Mul):
        return None
    parts = [_bounds(part, shape_env) for part in expr.args]
    if any(part is None or not part[0] >= 0 for part in parts):
        return None
    lower = [part[0] for part in parts if part is not None]
    upper = [part[1] for part in parts if part is not None]
    if expr.is_Add:
        return _exact(sum(lower), sum(upper))
    return None if 0 in upper else _exact(math.prod(lower), math.prod(upper))


def _number(limit: Any) -> float:
    """A limit of a range; infinite where it is no exact float."""
    if limit.is_Integer and -_LARGEST < limit.p < _LARGEST:
        return int(limit.p)
    return math.inf if limit == _t.int_oo or limit.is_positive else -math.inf


def _exact(lower: float, upper: float) -> _Bounds | None:
    return None if not lower < _LARGEST else (lower, upper if upper < _LARGEST else math.inf)


def _is_less(first: _Bounds, second: _Bounds) -> bool | None:
    if first[1] < second[0]:
        return True
    return False if first[0] >= second[1] else None


def _differ(first: _Bounds, second: _Bounds) -> bool | None:
    if first[1] < second[0] or second[1] < first[0]:
        return True
    return False if first == second and first[0] == first[1] else None


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer
