"""``a <= b`` and ``a != b`` are ``a < b``: what slices with symbolic bounds ask in two questions is one guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

_STRICT = {sympy.Le: sympy.Lt, sympy.Ge: sympy.Gt}


def made_strict(
    conditions: Mapping[sympy.Basic, Any],
) -> tuple[dict[sympy.Basic, Any], dict[sympy.Basic, Any]]:
    """Conditions with such pairs made one, and for each of these what the mapping holds for the inequality that is gone.

    >>> a, b = sympy.symbols("a b", integer=True)
    >>> made_strict({a <= b: "first", sympy.Ne(b, a): "second"})
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
