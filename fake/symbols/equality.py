"""Guards that two sizes are equal, recorded without asking sympy.

This is the guard that operators ask for most often, and the one that costs torch most: about half a millisecond to prove
nothing, solve, refine ranges that are the same already, and note the implications of ``True``. For two free sizes of the
same range all of that is known beforehand, and what remains is to write the decision down where torch would.
"""

from __future__ import annotations

import logging
from typing import Any

import sympy

from fake.symbols import _torch as _t
from fake.symbols.shape_env import ShapeEnv


class Equalities:
    """Records equalities of sizes that one operator asks for: who asks, and by which rules, is looked up once.

    >>> env = ShapeEnv(duck_shape=False)
    >>> a, b = (env.create_symbol(4, source=_t.LocalSource(name)) for name in "ab")
    >>> Equalities(env).guard(sympy.Eq(a, b)), env.replace(b) == env.replace(a), len(env.guards)
    (True, True, 1)
    """

    def __init__(self, shape_env: Any) -> None:
        self.shape_env = shape_env
        self._is_plain: bool | None = None
        self._line: Any = None

    def guard(self, condition: sympy.Basic) -> bool:
        """Record that two free sizes with the same value at hand are equal, if that is all that the question is about.

        The environment is left as its own ``evaluate_expr`` would leave it: the guard with its line, one size replaced
        by the other. Returns False, and does nothing, where more has to be decided.
        """
        shape_env = self.shape_env
        if self._is_plain is None:
            self._is_plain = _records_plainly(shape_env)
        if not self._is_plain or condition.__class__ is not sympy.Eq:
            return False
        left, right = condition.args
        if not (_is_free_size(shape_env, left) and _is_free_size(shape_env, right)):
            return False
        hints, ranges = _t.hints_of(shape_env), shape_env.var_to_range
        if hints[left] != hints[right] or ranges[left] != ranges[right] or ranges[left].is_singleton():
            return False
        axioms = shape_env.axioms
        if len(axioms) > 2 and (condition in axioms or sympy.Eq(right, left, evaluate=False) in axioms):
            return False  # it follows from earlier guards
        shape_env._log_guard("eval", condition, forcing_spec=False)
        if self._line is None:
            self._line = shape_env._get_sloc()
        replaced, kept = _in_torchs_order(shape_env, left, right)
        _t.replace_symbol(shape_env, replaced, kept, self._line)
        shape_env.guards.append(_t.ShapeGuard(condition, self._line, size_oblivious=False))
        axioms.update(_FROM_AN_EQUALITY)
        for symbol in (left, right):
            shape_env.symbol_guard_counter[symbol] += 1
        return True


_FROM_AN_EQUALITY = {sympy.true: sympy.true, sympy.false: sympy.false}
"""The implications of an equality, once one side is replaced by the other."""


def _records_plainly(shape_env: Any) -> bool:
    """Whether a guard would be recorded now, by torch's rules and no others."""
    return (
        shape_env.__class__ in (ShapeEnv, _t.TorchShapeEnv)
        and not shape_env.frozen
        and not shape_env.prefer_deferred_runtime_asserts_over_guards
        and not shape_env.should_record_events
        and not shape_env._translation_validation_enabled
        and not shape_env._suppress_guards_tls()
        and not shape_env.log.isEnabledFor(logging.INFO)
        and not _t.guards_are_limited(shape_env)
    )


def _is_free_size(shape_env: Any, symbol: Any) -> bool:
    """Whether an operand is a symbol with a value at hand that nothing has replaced."""
    return (
        symbol.__class__ is sympy.Symbol
        and symbol.is_integer
        and symbol not in shape_env.replacements
        and symbol not in shape_env.size_like
        and symbol in shape_env.var_to_range
        and getattr(_t.hints_of(shape_env).get(symbol), "is_Integer", False)
    )


def _in_torchs_order(shape_env: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """The symbol that torch replaces, and the one that it keeps: ephemeral and later names go first."""

    def order(symbol: Any) -> tuple[bool, bool, str]:
        sources = shape_env.var_to_sources.get(symbol)
        is_ephemeral = sources is not None and all(source.is_ephemeral() for source in sources)
        return is_ephemeral, not _t.symbol_is_type(symbol, _t.SymT.SIZE), symbol.name

    return (left, right) if order(left) > order(right) else (right, left)
