"""The table of exact rules: which function evaluates an ATen operator on dual numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Rule = Callable[..., Any]
"""Takes the arithmetic, the overload and the arguments; returns ``NotImplemented`` if it does not apply."""

RULES: dict[Any, Rule] = {}
"""The rules by operator.

Keys are overload packets such as ``torch.ops.aten.add``, or qualified names of operators that exist only once
some module is imported.
"""

_PRIMS_LIKE_ATEN = """abs acos acosh add asin asinh atan atan2 atanh ceil cos cosh digamma div eq erf erfc exp exp2 expm1 floor fmax fmin ge gt
isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ne neg pow reciprocal rsqrt sign signbit sin sinh sqrt sub tan tanh
trunc where"""
"""Primitives with the same arguments as the ATen operators of the same name."""

_ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "special_expit": "sigmoid",
    "special_exp2": "exp2",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arccosh": "acosh",
    "arcsinh": "asinh",
    "arctanh": "atanh",
    "fix": "trunc",
    "concat": "cat",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "moveaxis": "movedim",
}
"""Operators that are aliases of others."""


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators.

    >>> import torch
    >>> @rule()
    ... def negative(m, op, a):
    ...     return m.neg(a)

    Raises:
        ValueError: one of them already has a rule.
    """

    def register(function: Rule) -> Rule:
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"{operator} has an exact rule already: {RULES[operator].__qualname__}")
            RULES[operator] = function
        return function

    return register


def register_rules(table: Mapping[Any, Rule]) -> None:
    """Register rules that are single expressions, by operator.

    Raises:
        ValueError: an operator already has a rule.
    """
    for operator, function in table.items():
        rule(operator)(function)


def rule_of(target: Any) -> Rule | None:
    """Return the rule of an overload, or ``None``. A primitive has that of the ATen operator of its name.

    >>> rule_of(torch.ops.prims.exp.default) is RULES[torch.ops.aten.exp]
    True
    """
    found = RULES.get(target.overloadpacket) or RULES.get(target._schema.name)
    if found is None:
        namespace, _, name = target._schema.name.partition("::")
        other = _ALIASES.get(name, name if namespace == "prims" and name in _PRIMS_LIKE_ATEN.split() else "")
        found = RULES.get(getattr(torch.ops.aten, other)) if other else None
    return found


def named(text: str, namespace: Any = torch.ops.aten) -> list[Any]:
    """Return the operators with these names that this version of PyTorch has."""
    return [getattr(namespace, name) for name in text.split() if hasattr(namespace, name)]
