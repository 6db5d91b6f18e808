"""Look up and record calls on symbolic sizes: first in their environment, then with numbered symbols.

An entry of an environment (``SymbolicState.tables``) serves the very same symbols and adds no guards: they
are already recorded there. Entries about unbacked symbols are valid until anything new becomes known, because
every fact may change what is decided without a guard. Entries with numbered symbols
(``fake.cache.normalized``) are shared by all environments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fake.cache.evaluations import Evaluations, record_evaluations
from fake.cache.normalized import NormalizedCall, NormalizedTable
from fake.cache.recipe import Mark, build
from fake.cache.replacements import REPLACEMENTS
from fake.cache.store import drop_older_half
from fake.cache.symbolic import SymbolicState, state_of, symbols_of_key
from fake.cache.symbolic_recipe import Stale
from fake.seam.dispatch import library_utils
from fake.seam.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    backed_size_oblivious,
    guards_are_suppressed,
    replacements_version,
)
from fake.symbols.node import lean_state
from fake.tensors.tensor import Unkeyable

_MAX_ENTRIES_PER_ENVIRONMENT = 50_000
"""The number of entries at which the older half is dropped."""


class SymbolicEntry:
    """An entry of one environment.

    Attributes:
        rebuild: makes the outputs.
        recipe: what ``rebuild`` was compiled from; None for a negative entry.
        evaluations: returns what the dispatch evaluated, for a recording that uses the entry.
        facts: the knowledge that the entry depends on, or None for backed symbols.
        symbols: the unbacked symbols that the facts are about.
    """

    __slots__ = ("evaluations", "facts", "rebuild", "recipe", "symbols")

    def __init__(
        self,
        rebuild: Any,
        recipe: Any,
        evaluations: Callable[[], Evaluations],
        facts: Any = None,
        symbols: tuple[Any, ...] = (),
    ) -> None:
        self.rebuild, self.recipe, self.evaluations = rebuild, recipe, evaluations
        self.facts, self.symbols = facts, symbols


class SymbolicTables:
    """The symbolic entries of one engine.

    Args:
        tensor_class: the exact class of the engine's tensors.
    """

    def __init__(self, tensor_class: type) -> None:
        self.tensor_class = tensor_class
        self.normalized = NormalizedTable()
        self._states: weakref.WeakSet[SymbolicState] = weakref.WeakSet()

    def find(self, shape_env: Any, func: Any, key: Any) -> Any:
        """Return the closure that rebuilds the outputs of a call already seen with these symbols, or None.

        Args:
            shape_env: the environment of the call.
            func: the operator.
            key: the key of the call, with the environment's own symbols.
        """
        state = shape_env.__dict__.get("_fake_dispatch")
        if state is None:
            return None
        entry = state.table(func, self.tensor_class).get(key)
        if entry is None:
            return None
        if entry.facts is not None and entry.facts != _facts_version(shape_env, entry.symbols):
            return None
        log = lean_state(shape_env).log
        if log is not None:
            log.include(entry.evaluations())
        return entry.rebuild

    def insert(self, state: SymbolicState, func: Any, key: Any, entry: SymbolicEntry) -> None:
        """Add an entry to an environment, making room first if the limit is reached.

        Args:
            state: the cache's state on the environment.
            func: the operator.
            key: the key of the call, with the environment's own symbols.
            entry: the entry.
        """
        self._states.add(state)
        if state.size >= _MAX_ENTRIES_PER_ENVIRONMENT:
            state.size = drop_older_half(state.tables.values())
        table = state.table(func, self.tensor_class)
        state.size += key not in table
        table[key] = entry

    def forget(self, shape_env: Any, func: Any, key: Any) -> None:
        """Drop an entry of an environment.

        Args:
            shape_env: the environment.
            func: the operator.
            key: the key of the entry.
        """
        state_of(shape_env).table(func, self.tensor_class).pop(key, None)

    def clear(self) -> None:
        """Drop all entries, including those on environments."""
        self.normalized.clear()
        for state in list(self._states):
            state.clear()


class SymbolicCall:
    """A call for which its environment has no entry.

    Raises:
        Unkeyable: nothing may be cached in this environment.
    """

    def __init__(self, tables: SymbolicTables, shape_env: Any, func: Any, key: Any) -> None:
        if backed_size_oblivious():
            raise Unkeyable("backed_size_oblivious")
        self.tables, self.shape_env, self.func, self.key = tables, shape_env, func, key
        self.state = state_of(shape_env)
        self.is_outdated = False
        self.unbacked: tuple[Any, ...] = ()
        self.facts = None
        self.normalized: NormalizedCall | None
        try:
            self.normalized = NormalizedCall(key, shape_env)
        except Unkeyable:
            self.normalized = None  # this call is dispatched, and recorded for its own symbols
            symbols = symbols_of_key(key)
            self.is_outdated = not symbols.isdisjoint(shape_env.replacements)
            self.unbacked = tuple(
                sorted((s for s in symbols if s not in shape_env.backed_var_to_val), key=str)
            )
            if self.unbacked:
                self.facts = _facts_version(shape_env, self.unbacked)

    def find_normalized(self, mark: Mark) -> Any:
        """Return a closure that rebuilds the outputs from an equal call up to symbol names, or None."""
        call = self.normalized
        entry = None if call is None else self.tables.normalized.find(self.func, call)
        if call is None or entry is None:
            return None
        try:
            if not call.evaluate_again(entry):
                return None
            recipe = call.recipe(entry)
            rebuild = build(recipe, self.tables.tensor_class, mark)
        except (Unkeyable, Stale, GuardOnDataDependentSymNode):
            return None
        evaluations = partial(call.evaluations, entry)
        log = lean_state(self.shape_env).log
        if log is not None:
            log.include(evaluations())
        self.tables.insert(self.state, self.func, self.key, SymbolicEntry(rebuild, recipe, evaluations))
        return rebuild

    def known_recipe(self) -> Any:
        """Return the recipe of the environment's entry for this call, or None."""
        entry = self.state.table(self.func, self.tables.tensor_class).get(self.key)
        return None if entry is None else entry.recipe

    def record(self) -> AbstractContextManager[Evaluations]:
        """Record what the dispatch evaluates (nested dispatches record for both)."""
        return record_evaluations(self.shape_env)

    def record_outcome(self, rebuild: Any, recipe: Any, evaluations: Evaluations) -> None:
        """Record the outcome of the dispatch; ``recipe`` is None for a negative entry.

        Args:
            rebuild: rebuilds the outputs.
            recipe: the description that it was compiled from.
            evaluations: what the dispatch evaluated.

        Raises:
            Unkeyable: the environment currently records no guards, which a later hit would then lack.
        """
        if guards_are_suppressed() or self.shape_env.frozen:
            raise Unkeyable("suppressed guards")
        symbolic_entry = SymbolicEntry(rebuild, recipe, lambda: evaluations, self.facts, self.unbacked)
        self.tables.insert(self.state, self.func, self.key, symbolic_entry)
        if recipe is None or self.normalized is None or REPLACEMENTS.any_builtin:
            return
        if not library_utils.is_builtin(self.func):
            return  # its fake kernel may read anything about the sizes
        try:
            entry = self.normalized.entry(recipe, evaluations)
        except Unkeyable:
            return  # recorded for its own symbols only
        self.tables.normalized.add(self.func, self.normalized.key, entry)


def _facts_version(shape_env: Any, symbols: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a value that changes with everything that becomes known in an environment,
    and with the symbols' ranges."""
    return (
        shape_env._version_counter,
        replacements_version(shape_env),
        len(shape_env.guards),
        len(shape_env.axioms),
        shape_env.num_deferred_runtime_asserts,
        tuple([shape_env.var_to_range.get(symbol) for symbol in symbols]),
        tuple([symbol in shape_env.size_like for symbol in symbols]),
    )
