"""Reuse symbolic results for other symbols: the result of ``add(s0 x s1)`` serves ``add(s5 x s7)``.

A call is looked up by its key with symbols numbered in order of appearance, together with everything that the
shape environment knows about them: ranges, divisibility, recorded facts that mention them. An entry is used
if every expression that the recorded dispatch evaluated has the same value here. The expressions are then
evaluated in this environment, which leaves the guards that a dispatch would leave. Otherwise the operator is
dispatched.

Only backed integer symbols are numbered. A dispatch that may depend on more than these answers (a kernel that
reads hints, a user's kernel) is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fake.cache.evaluations import Evaluations
from fake.cache.expressions import Encoded, decode, encode, evaluate
from fake.cache.links import Linked
from fake.cache.recipe import Fresh, Recipe, Sequence, View
from fake.cache.store import drop_older_half
from fake.cache.symbolic import SizeToken, SymbolicMetadata, intern_symbolic, state_of, token_of_expression
from fake.cache.symbolic_recipe import SymbolicConstant
from fake.seam.symbolic_shapes import guards_are_suppressed, replacements_version
from fake.tensors.metadata import MetadataTable, TensorMetadata
from fake.tensors.tensor import Unkeyable


class NormalizedMetadata(TensorMetadata):
    """Metadata with encoded sizes, interned: identity is equality, as everywhere in keys."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (intern_normalized, self.fields())


_NORMALIZED = MetadataTable(NormalizedMetadata)


def intern_normalized(
    shape: tuple[Encoded, ...],
    stride: tuple[Encoded, ...],
    dtype: torch.dtype,
    device: torch.device,
    offset: Encoded,
    flags: int,
) -> NormalizedMetadata:
    """Return the process's unique object for these values.

    Args:
        shape: sizes, each an integer or an encoded expression.
        stride: strides in elements, likewise.
        dtype: the tensor's dtype.
        device: its device.
        offset: its storage offset in elements, likewise.
        flags: see ``fake.tensors.metadata``.
    """
    found: Any = _NORMALIZED.intern(shape, stride, dtype, device, offset, flags)
    return found


def normalized_metadata(metadata: SymbolicMetadata, number_of: Callable[[Any], int]) -> NormalizedMetadata:
    """Return metadata with encoded sizes.

    Raises:
        Unkeyable: an expression has no encoding.
    """

    def encoded(value: Any) -> Encoded:
        return value if value.__class__ is int else encode(value.expr, number_of)

    return intern_normalized(
        tuple([encoded(size) for size in metadata.shape]),
        tuple([encoded(size) for size in metadata.stride]),
        metadata.dtype,
        metadata.device,
        encoded(metadata.offset),
        metadata.flags,
    )


def pattern_of(owner: SymbolicMetadata | SizeToken) -> tuple[Any, tuple[Any, ...]]:
    """Return the pattern of metadata or of a size, and its symbols in the order in
    which the pattern numbers them.

    Raises:
        Unkeyable: an expression has no encoding.
    """
    found = owner.pattern
    if found is None:
        numbers: dict[Any, int] = {}

        def number_of(symbol: Any) -> int:
            return numbers.setdefault(symbol, len(numbers))

        pattern: Any
        if owner.__class__ is SizeToken:
            pattern = ("size", encode(owner.expr, number_of))
        else:
            pattern = normalized_metadata(owner, number_of)  # type: ignore[arg-type]
        found = owner.pattern = (pattern, tuple(numbers))
    return found


@dataclass(frozen=True)
class Entry:
    """The outcome of a call, up to the names of its symbols.

    Attributes:
        recipe: with :class:`NormalizedMetadata`, encoded storage sizes and encoded symbolic constants.
        evaluations: ``(kind, encoded expression, size_oblivious, answer)``, in order.
    """

    recipe: Recipe
    evaluations: tuple[tuple[str, Encoded, bool, Any], ...]

    def has_same_recipe(self, other: Entry) -> bool:
        """Return whether the entries differ at most in their links."""
        return self.evaluations == other.evaluations and getattr(
            self.recipe, "recipe", self.recipe
        ) == getattr(other.recipe, "recipe", other.recipe)


class NormalizedCall:
    """A call with the symbols of its key numbered.

    Args:
        key: the key of the call in its environment.

    Raises:
        Unkeyable: a symbol is unbacked or has been replaced, an expression cannot be encoded, or the
            environment is frozen or records no guards in this thread.
    """

    def __init__(self, key: Any, shape_env: Any) -> None:
        if shape_env.frozen or guards_are_suppressed():
            raise Unkeyable("no guards are recorded")
        if shape_env.prefer_deferred_runtime_asserts_over_guards:
            raise Unkeyable("assertions instead of guards")
        self.shape_env = shape_env
        self.state = state_of(shape_env)
        self.symbols: list[Any] = []
        self.values: list[int] = []
        self._numbers: dict[Any, int] = {}
        self._tokens: dict[Encoded, Any] = {}
        self._symbol_facts: list[Any] = []
        self._accepts_new_symbols = True
        normalized = self._normalized(key)
        known = _facts(self)
        self.key = (normalized, tuple(self._symbol_facts), known)
        self._accepts_new_symbols = False

    def number_of(self, symbol: Any) -> int:
        """Return the number of a symbol; a new symbol gets the next one."""
        number = self._numbers.get(symbol)
        if number is None:
            if not self._accepts_new_symbols:
                raise Unkeyable("unrepresented symbol")
            symbol_facts, value = _symbol_facts(self.shape_env, self.state, symbol)
            number = self._numbers[symbol] = len(self.symbols)
            self.symbols.append(symbol)
            self.values.append(value)
            self._symbol_facts.append(symbol_facts)
        return number

    def encode(self, value: Any) -> Encoded:
        """Encode a number, token or expression as plain data, for :meth:`decode`."""
        if value.__class__ in (int, bool):
            return value
        return encode(value.expr if value.__class__ is SizeToken else value, self.number_of)

    def decode(self, encoded: Encoded) -> Any:
        """Return the expression on this call's symbols."""
        return decode(encoded, self.symbols)

    def _normalized(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        parts: list[Any] = []
        for part in key:
            kind = type(part)
            if kind is SymbolicMetadata or kind is SizeToken:
                pattern, symbols = part.pattern or pattern_of(part)
                parts.append(pattern)
                parts.append(tuple([self.number_of(symbol) for symbol in symbols]))
            elif kind is tuple:
                parts.append(self._normalized(part))
            else:
                parts.append(part)
        return tuple(parts)

    def normalized_metadata(self, metadata: Any) -> Any:
        """Return symbolic metadata with encoded sizes; other metadata unchanged."""
        if type(metadata) is not SymbolicMetadata:
            return metadata
        return normalized_metadata(metadata, self.number_of)

    def entry(self, recipe: Recipe, evaluations: Evaluations) -> Entry:
        """Return the entry that describes a dispatch.

        Raises:
            Unkeyable: the dispatch cannot be replayed on other symbols.
        """
        if evaluations.unreplayable_reason is not None:
            raise Unkeyable(evaluations.unreplayable_reason)
        encoded_evaluations: dict[Any, None] = {}
        for kind, expr, size_oblivious, answer in evaluations.expressions:
            encoded = self._encode_exactly(expr)
            encoded_evaluations[(kind, encoded, size_oblivious, _as_python_number(answer))] = None
        normalized = _map_recipe(
            recipe, self.normalized_metadata, self.encode, lambda value: self._encode_exactly(value.expr)
        )
        return Entry(normalized, tuple(encoded_evaluations))

    def _encode_exactly(self, expr: Any) -> Encoded:
        """Return an encoding that decodes to the identical expression."""
        encoded = self.encode(expr)
        if self.decode(encoded) != expr:
            raise Unkeyable("expression in a special form")
        return encoded

    def matches(self, entry: Entry) -> bool:
        """Return whether a recorded dispatch's expressions have the same values at this call's sizes."""
        try:
            return all(
                evaluate(encoded, self.values) == answer for _, encoded, _, answer in entry.evaluations
            )
        except ArithmeticError:
            return False

    def evaluate_again(self, entry: Entry) -> bool:
        """Evaluate a recorded dispatch's expressions in the environment; False as soon as a value differs."""
        evaluated = self.state.evaluated
        for kind, encoded, size_oblivious, answer in entry.evaluations:
            if kind == "look":
                continue
            expr = self.decode(encoded)
            evaluation = (expr, size_oblivious)
            if evaluation in evaluated:
                continue
            if self.shape_env.evaluate_expr(expr, size_oblivious=size_oblivious) != answer:
                return False
            evaluated.add(evaluation)
        return True

    def evaluations(self, entry: Entry) -> Evaluations:
        """Return an entry's evaluations on this call's symbols."""
        made = Evaluations()
        for kind, encoded, size_oblivious, answer in entry.evaluations:
            made.add(kind, self.decode(encoded), size_oblivious, answer)
        return made

    def recipe(self, entry: Entry) -> Recipe:
        """Return the recipe for this call's symbols, after evaluating the expressions,
        which may replace some."""
        self._tokens.clear()
        self._replaced = not self.shape_env.replacements.keys().isdisjoint(self.symbols)
        return _map_recipe(entry.recipe, self._restore_metadata, self._token, self._symbolic_token)

    def _symbolic_token(self, encoded: Encoded) -> Any:
        token = self._token(encoded)
        if token.__class__ is int:
            raise Unkeyable("a size that is known now")
        return token

    def _restore_metadata(self, metadata: Any) -> Any:
        if type(metadata) is not NormalizedMetadata:
            return metadata
        shape = tuple([self._token(size) for size in metadata.shape])
        stride = tuple([self._token(size) for size in metadata.stride])
        offset = self._token(metadata.offset)
        return intern_symbolic(
            self.shape_env, shape, stride, metadata.dtype, metadata.device, offset, metadata.flags
        )

    def _token(self, encoded: Encoded) -> Any:
        if encoded.__class__ is int:
            return encoded
        token = self._tokens.get(encoded)
        if token is None:
            if encoded[0] == "s" and not self._replaced:
                symbol = self.symbols[encoded[1]]
                token = token_of_expression(symbol, self.shape_env, self.values[encoded[1]], {symbol})
            else:
                hint = evaluate(encoded, self.values)
                expr = self.decode(encoded)
                if self._replaced:
                    expr = self.shape_env.replace(expr)
                token = token_of_expression(expr, self.shape_env, hint if hint.__class__ is int else None)
            self._tokens[encoded] = token
        return token


def _map_recipe(recipe: Any, metadata: _Change, size: _Change, constant: _Change) -> Any:
    """Replace metadata, storage sizes and symbolic constants in a recipe; other parts are unchanged."""

    def changed(recipe: Any) -> Any:
        if isinstance(recipe, Linked):
            return Linked(changed(recipe.recipe), recipe.links)
        if isinstance(recipe, Sequence):
            return Sequence(recipe.type, tuple([changed(item) for item in recipe.items]))
        if isinstance(recipe, SymbolicConstant):
            return SymbolicConstant(constant(recipe.value))
        if isinstance(recipe, Fresh):
            return Fresh(metadata(recipe.metadata), size(recipe.nbytes))
        if isinstance(recipe, View):
            return View(metadata(recipe.metadata), recipe.path, recipe.same_dtype)
        return recipe

    return changed(recipe)


_Change = Callable[[Any], Any]


def _as_python_number(answer: Any) -> Any:
    """Return an answer as a Python number."""
    if answer.__class__ in (bool, int):
        return answer
    if answer.is_Boolean:
        return bool(answer)
    if answer.is_Integer:
        return int(answer)
    raise Unkeyable("an answer that is no integer")


def _symbol_facts(shape_env: Any, state: Any, symbol: Any) -> tuple[Any, int]:
    """Return what the environment knows about a symbol by itself, and its hint.

    Raises:
        Unkeyable: the symbol is unbacked or has been replaced.
    """
    bounds = shape_env.var_to_range.get(symbol)
    remembered = state.symbol_facts.get(symbol)
    if remembered is None or remembered[0] is not bounds:
        hint = shape_env.backed_var_to_val.get(symbol)
        if hint is None or not hint.is_Integer:
            raise Unkeyable("unbacked symbol")
        limits = [encode(limit, _refuse_symbol) for limit in (bounds.lower, bounds.upper)]
        symbol_facts = (*limits, symbol.is_integer, symbol.is_positive, symbol.is_nonnegative)
        remembered = state.symbol_facts[symbol] = (bounds, symbol_facts, int(hint))
    if symbol in shape_env.replacements:
        raise Unkeyable("replaced symbol")
    _, symbol_facts, value = remembered
    return (symbol_facts, symbol in shape_env.size_like) if shape_env.size_like else symbol_facts, value


def _refuse_symbol(symbol: Any) -> int:
    raise Unkeyable("a range between symbols")


def _facts(call: NormalizedCall) -> frozenset:
    """Return the facts that relate a call's symbols to each other and to further ones,
    which get numbered, too."""
    shape_env, state = call.shape_env, call.state
    facts = _all_facts(shape_env, state)
    if not facts:
        return frozenset()
    of_key = tuple(call.symbols)
    remembered = state.facts_of_symbols.get(of_key)
    if remembered is None:
        known = _facts_about(call, facts)
        state.facts_of_symbols[of_key] = (tuple(call.symbols[len(of_key) :]), known)
    else:
        others, known = remembered
        for symbol in others:
            call.number_of(symbol)
    return known


def _all_facts(shape_env: Any, state: Any) -> list[tuple[str, Any, Any, frozenset]]:
    """Return ``(kind, expression, value, symbols)`` of every fact, collected again if anything changed."""
    version = (
        replacements_version(shape_env),
        shape_env._version_counter,
        len(shape_env.guards),
        len(shape_env.axioms),
        len(shape_env.divisible),
        shape_env.num_deferred_runtime_asserts,
    )
    if state.facts_version != version:
        facts = [("axiom", fact, value) for fact, value in shape_env.axioms.items()]
        facts += [("divisible", fact, True) for fact in shape_env.divisible]
        facts += [("guard", shape_env.replace(guard.expr), True) for guard in shape_env.guards]
        facts += [
            ("assert", asserted.expr, True)
            for asserts in shape_env.deferred_runtime_asserts.values()
            for asserted in asserts
        ]
        with_symbols = [
            (kind, expr, value, expr.free_symbols) for kind, expr, value in facts if not expr.is_Atom
        ]
        state.facts = [fact for fact in with_symbols if fact[3]]
        state.facts_of_symbols.clear()
        state.facts_version = version
    return state.facts


def _facts_about(call: NormalizedCall, facts: list[tuple[str, Any, Any, frozenset]]) -> frozenset:
    """Return the encoded facts that mention a symbol of a call; other symbols in them get numbered, too."""
    chosen: list[tuple[str, Any, Any, frozenset]] = []
    done = 0
    while done < len(call.symbols):  # newly reached symbols may be mentioned by further facts
        reached, done = set(call.symbols), len(call.symbols)
        chosen = [fact for fact in facts if not fact[3].isdisjoint(reached)]
        for *_, symbols in chosen:
            for symbol in sorted(symbols - reached, key=str):
                call.number_of(symbol)
    return frozenset([(kind, call.encode(expr), call.encode(value)) for kind, expr, value, _ in chosen])


class NormalizedTable:
    """The entries of one engine, by operator and normalized key."""

    limit = 20_000
    """The number of keys at which the older half is dropped."""
    MAX_ENTRIES_PER_KEY = 8
    """How many dispatches with different answers are kept for one key."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables: dict[Any, dict[Any, tuple[Entry, ...]]] = {}
        self.new: list[tuple[Any, Any, Entry]] = []
        self.size = 0

    def find(self, func: Any, call: NormalizedCall) -> Entry | None:
        """Return an entry whose dispatch would take the same path for this call, or None."""
        for entry in self.tables.get(func, {}).get(call.key, ()):
            if call.matches(entry):
                return entry
        return None

    def add(self, func: Any, key: Any, entry: Entry, *, is_new: bool = True) -> None:
        """Add an entry.

        Args:
            is_new: whether the entry should be saved to disk.
        """
        with self.lock:
            if self.size >= self.limit:
                self.size = drop_older_half(self.tables.values())
                self.new.clear()
            table = self.tables.setdefault(func, {})
            entries = table.get(key, ())
            others = tuple([other for other in entries if not other.has_same_recipe(entry)])
            if entry in entries or len(others) >= self.MAX_ENTRIES_PER_KEY:
                return
            table[key] = (*others, entry)
            self.size += len(others) == len(entries)
            if is_new:
                self.new.append((func, key, entry))

    def take_new(self) -> list[tuple[Any, Any, Entry]]:
        """Return the entries added since the last call."""
        with self.lock:
            taken, self.new = self.new, []
            return taken

    def clear(self) -> None:
        """Drop all entries."""
        with self.lock:
            self.tables.clear()
            self.new.clear()
            self.size = 0
