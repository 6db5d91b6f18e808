"""The table of exact rules: which function evaluates an ATen operator on dual numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RULES", "Rule", "named", "rule"]

Rule = Callable[..., Any]
"""Called with the arithmetic, the overload and the call's arguments; returns ``NotImplemented`` where it does not apply."""

RULES: dict[Any, Rule] = {}
"""By operator (an overload packet, such as ``torch.ops.aten.add``)."""


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators.

    >>> import torch
    >>> @rule()
    ... def negative(m, op, a):
    ...     return m.neg(a)

    Raises:
        ValueError: one of them has a rule already.
    """

    def register(function: Rule) -> Rule:
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"{operator} has an exact rule already: {RULES[operator].__qualname__}")
            RULES[operator] = function
        return function

    return register


def named(text: str, namespace: Any = torch.ops.aten) -> list[Any]:
    """The operators of a list of names, those that this torch has."""
    return [getattr(namespace, name) for name in text.split() if hasattr(namespace, name)]
