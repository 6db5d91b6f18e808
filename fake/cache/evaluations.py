"""Record the expressions that a dispatch evaluates in a shape environment,
so that they can be replayed on other symbols.

A dispatch on symbolic sizes is a program whose every decision is the value of an expression. If the same
expressions on renamed symbols have the same values, the program takes the same path, leaves the same guards
and gives the same result. So a miss is recorded: expressions that the environment's facts do not decide are
noted, and a hit evaluates them again.

Recording installs methods on the environment object itself while the dispatch runs; remembered answers of
lean nodes are reported by ``fake.symbols.node``. Any other change of the environment ends the recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake.seam.symbolic_shapes import guards_are_suppressed, shape_env_changes
from fake.symbols.node import lean_state


class Evaluations:
    """The expressions that one dispatch evaluated, in order.

    Attributes:
        expressions: ``(kind, expression, size_oblivious, answer)``; kinds are ``"evaluate"`` (guard on the
            answer) and ``"look"`` (the answer was used without recording a guard: guards were suppressed, or
            facts imply it).
        records_hint_reads: False while a kernel reads hints only to find what it would find for any others.
        unreplayable_reason: why the dispatch cannot be replayed by its evaluations alone, or None.
    """

    def __init__(self) -> None:
        self.expressions: list[tuple[str, Any, bool, Any]] = []
        self.records_hint_reads = True
        self.unreplayable_reason: str | None = None
        self.thread = threading.get_ident()

    def add_memoized(self, expr: Any, answer: Any) -> None:
        """Note that a lean node answered from memory: its guard, if any, is a fact of the environment."""
        if getattr(expr, "free_symbols", None):
            self.add("look", expr, False, answer)

    def add_hint_read(self, expr: Any, value: Any) -> None:
        """Note that a kernel read a hint: the result of the dispatch is known for this value only."""
        if self.records_hint_reads and getattr(expr, "free_symbols", None):
            if value.__class__ in (int, bool):
                self.add("look", expr, False, value)
            else:
                self.unreplayable_reason = "a hint that is no integer"

    def add(self, kind: str, expr: Any, size_oblivious: bool, answer: Any) -> None:
        """Add an evaluation.

        Args:
            kind: ``"evaluate"`` or ``"look"``, see above.
            expr: the sympy expression.
            size_oblivious: whether unbacked sizes counted as at least 2.
            answer: its value, of sympy or of Python.
        """
        if threading.get_ident() != self.thread:
            self.unreplayable_reason = "several threads in one shape environment"
        self.expressions.append((kind, expr, size_oblivious, answer))

    def include(self, other: Evaluations) -> None:
        """Add the evaluations of a dispatch inside this one, or of a recipe that replaced it."""
        self.expressions.extend(other.expressions)
        self.unreplayable_reason = self.unreplayable_reason or other.unreplayable_reason
        if other.thread != self.thread:
            self.unreplayable_reason = "several threads in one shape environment"


@contextmanager
def record_evaluations(shape_env: Any) -> Iterator[Evaluations]:
    """Record what is evaluated inside; a nested recording reports to both."""
    state = lean_state(shape_env)
    outer: Evaluations | None = state.log
    evaluations = state.log = Evaluations()
    installed = _install_listeners(shape_env, state) if outer is None else ()
    try:
        yield evaluations
    except BaseException:
        evaluations.unreplayable_reason = evaluations.unreplayable_reason or "an error"
        raise
    finally:
        state.log = outer
        for name in installed:
            shape_env.__dict__.pop(name, None)
        if outer is not None:
            outer.include(evaluations)


@contextmanager
def ignore_hint_reads(shape_env: Any) -> Iterator[None]:
    """Inside, reads of hints do not affect the outcome."""
    log = lean_state(shape_env).log
    if log is None:
        yield
        return
    before, log.records_hint_reads = log.records_hint_reads, False
    try:
        yield
    finally:
        log.records_hint_reads = before


def mark_unreplayable(shape_env: Any, reason: str) -> None:
    """Declare that the running dispatch depends on more than its evaluations (a kernel
    that may read hints)."""
    log = lean_state(shape_env).log
    if log is not None:
        log.unreplayable_reason = reason


def _install_listeners(shape_env: Any, state: Any) -> list[str]:
    """Listen on the environment's methods; changes made by an evaluation are a part of it."""
    depth = 0

    def log() -> Evaluations:
        return state.log or Evaluations()  # another thread may have ended the recording

    def evaluate_expr(expr: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth:
            return methods["evaluate_expr"](expr, *args, **kwargs)
        depth += 1
        before = _fact_counts(shape_env)
        try:
            answer = methods["evaluate_expr"](expr, *args, **kwargs)
        except BaseException:
            log().unreplayable_reason = "an evaluation that failed"
            raise
        finally:
            depth -= 1
        size_oblivious = bool(args[2] if len(args) > 2 else kwargs.get("size_oblivious", False))
        if kwargs.get("forcing_spec"):
            log().unreplayable_reason = "forced specialisation"
        if guards_are_suppressed():
            log().add("look", expr, size_oblivious, answer)
        elif _fact_counts(shape_env) != before:  # else facts decide it, here and for symbols of equal facts
            log().add("evaluate", expr, size_oblivious, answer)
        return answer

    def guard_or_defer_runtime_assert(*args: Any, **kwargs: Any) -> Any:
        deferred = shape_env.num_deferred_runtime_asserts
        answer = methods["guard_or_defer_runtime_assert"](
            *args, **kwargs
        )  # guards by way of ``evaluate_expr``
        if shape_env.num_deferred_runtime_asserts != deferred or guards_are_suppressed():
            log().unreplayable_reason = "a runtime assertion"
        return answer

    def unreplayable_change(name: str) -> Callable:
        def change(*args: Any, **kwargs: Any) -> Any:
            if not depth:
                log().unreplayable_reason = f"{name} of the shape environment"
            return methods[name](*args, **kwargs)

        return change

    listeners = {
        "evaluate_expr": evaluate_expr,
        "guard_or_defer_runtime_assert": guard_or_defer_runtime_assert,
        **{name: unreplayable_change(name) for name in shape_env_changes},
    }
    own = shape_env.__dict__
    methods = {name: getattr(shape_env, name) for name in listeners if name not in own}
    if len(methods) < len(listeners):  # other code listens, too
        log().unreplayable_reason = "a shape environment with methods of its own"
        return []
    own.update(listeners)
    return list(listeners)


def _fact_counts(shape_env: Any) -> tuple[int, ...]:
    """Return a value that changes with every fact that an evaluation leaves behind."""
    return (
        len(shape_env.guards),
        shape_env.num_deferred_runtime_asserts,
        len(shape_env.replacements),
        len(shape_env.divisible),
        len(shape_env.axioms),
    )
