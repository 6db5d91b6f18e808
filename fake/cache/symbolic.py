"""Symbolic sizes in the dispatch cache.

Keys and recipes refer to a size by a :class:`SizeToken`, one object per expression of a shape environment.
Everything here belongs to one environment and is stored on it: guards of a miss are recorded there, so a hit
needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fake.seam.symbolic_shapes import HIDDEN_FILES, SymNode, copy_node
from fake.symbols.node import LeanNode, adopt, canonicalize, lean_state
from fake.tensors.metadata import TensorMetadata, intern
from fake.tensors.tensor import SymbolicSizes, Unkeyable, flags_of, static_metadata_of

for _path in Path(__file__).parents[1].rglob("*.py"):
    if _path.parent.name in ("fake", "cache", "dispatch", "symbols", "tensors"):
        HIDDEN_FILES.add(str(_path))


class SizeToken:
    """One expression of one shape environment; identity is equality.

    Attributes:
        seen: the number of replaced symbols when its nodes were last known to stand for it;
            -1 if never checked.
    """

    __slots__ = ("expr", "node", "pattern", "seen", "shape_env", "symbols")

    def __init__(self, node: Any, expr: Any, shape_env: Any, symbols: Any = None) -> None:
        self.node, self.expr, self.shape_env = node, expr, shape_env
        self.symbols = expr.free_symbols if symbols is None else symbols
        self.seen = -1
        self.pattern: Any = None  # see ``fake.cache.normalized``

    def __repr__(self) -> str:
        return f"SizeToken({self.expr})"

    def symbol(self) -> torch.SymInt:
        """Return a symbolic integer with its own node:
        a shared node would tie sizes that only happen to be equal."""
        return torch.SymInt(copy_node(self.node))


class SymbolicMetadata(TensorMetadata):
    """Metadata in which some sizes are symbolic; the fields hold tokens for those."""

    __slots__ = ("pattern", "shape_env", "symbols")

    pattern: Any
    shape_env: Any
    symbols: frozenset[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("symbolic metadata belongs to a live shape environment and cannot be pickled")


class SymbolicState:
    """The cache's state on one shape environment: tokens, metadata, and a table per operator.

    Attributes:
        prototypes: patterns for outputs, each with an empty tensor on its storage, by sizes.
        evaluated: expressions that the environment has evaluated, with a guard if one was needed.
        facts, facts_version, facts_of_symbols: what it knew at a version, and the part about given symbols, for
            ``fake.cache.normalized``.
        symbol_facts: what is known about each symbol by itself, likewise.
    """

    def __init__(self, shape_env: Any) -> None:
        self.tokens: dict[Any, SizeToken] = {}
        self.metadata: dict[Any, SymbolicMetadata] = {}
        self.tables: dict[Any, dict[Any, Any]] = {}
        self.size = 0
        self.prototypes: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.evaluated: set[Any] = set()
        self.facts: list[Any] = []
        self.facts_version: Any = None
        self.facts_of_symbols: dict[Any, Any] = {}
        self.symbol_facts: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict) -> SymbolicState:
        return SymbolicState(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SymbolicState, (None,))

    def table(self, func: Any, tensor_class: type) -> dict[Any, Any]:
        """Return the table of an operator, for tensors of one class."""
        key = table_key(func, tensor_class)
        found = self.tables.get(key)
        if found is None:
            found = self.tables.setdefault(key, {})
        return found

    def clear(self) -> None:
        """Drop all recipes (tokens and metadata stay, because tensors hold them)."""
        self.tables.clear()
        self.prototypes.clear()
        self.size = 0


def table_key(func: Any, tensor_class: type) -> tuple[int, int]:
    """Return the key of an operator's table in an environment,
    by tensor class (ours compares equal to torch's)."""
    return (id(func), id(tensor_class))


def state_of(shape_env: Any) -> SymbolicState:
    """Return the cache's state on a shape environment.

    Raises:
        Unkeyable: the environment records its events for replay, or validates translation:
            nothing may be skipped.
    """
    state = shape_env.__dict__.get("_fake_dispatch")
    if state is None:
        if shape_env.should_record_events or shape_env._translation_validation_enabled:
            raise Unkeyable("recording shape environment")
        HIDDEN_FILES.update_torch()
        state = shape_env.__dict__["_fake_dispatch"] = SymbolicState(shape_env)
    return state


def token(value: Any) -> Any:
    """Return an integer, or the token of a symbolic one (an integer if its symbol has been specialized).

    Raises:
        Unkeyable: the number is a nested integer, or its node is not torch's.
    """
    if type(value) is int:
        return value
    node = value.node
    cached = getattr(node, "_fake_token", None)
    if cached is not None and len(cached.shape_env.replacements) == cached.seen:
        return cached
    if type(node) is not LeanNode:
        if type(node) is not SymNode:
            raise Unkeyable("symbolic shape")
        if node.shape_env is not None and lean_state(node.shape_env).adopts:
            adopt(value)
    expr = node.expr
    if cached is not None and cached.expr is expr:
        cached.seen = len(cached.shape_env.replacements)
        return cached
    if expr.is_number:
        return int(expr)
    shape_env = node.shape_env
    tokens = state_of(shape_env).tokens
    found = tokens.get(expr)
    if found is None:
        canonicalize(node, lean_state(shape_env))
        found = tokens[expr] = SizeToken(copy_node(node), expr, shape_env)
    node.__dict__["_fake_token"] = found
    return found


def token_of_expression(expr: Any, shape_env: Any, hint: int | None = None, symbols: Any = None) -> Any:
    """Return an integer, or the token of an expression of backed symbols that may not have a node yet.

    Args:
        hint: its current value, if the caller knows it.
        symbols: its symbols, if the caller knows that there are any.
    """
    if symbols is None and expr.is_number:
        return int(expr)
    tokens = state_of(shape_env).tokens
    found = tokens.get(expr)
    if found is None:
        if hint is None:
            hint = int(expr.xreplace(shape_env.backed_var_to_val))
        node = _node_of(expr, shape_env, hint)
        found = tokens[expr] = SizeToken(node, expr, shape_env, symbols)
        node.__dict__["_fake_token"] = found
    return found


def _node_of(expr: Any, shape_env: Any, hint: int) -> Any:
    """Return a node for an expression with symbols: a known one, or one that answers immediately."""
    state = lean_state(shape_env)
    known = state.canonical.get((expr, int, True))
    if known is not None:
        return copy_node(known)
    node = SymNode(expr, shape_env, int, hint)
    if state.adopts:
        node.__class__ = LeanNode
    canonicalize(node, state)
    return node


def metadata_of(tensor: Any) -> TensorMetadata:
    """Return the interned metadata of a strided fake tensor, and cache it on the tensor.

    Raises:
        Unkeyable: the tensor is a constant, carries a real tensor, or is sparse, nested or quantized.
    """
    try:
        found = static_metadata_of(tensor)
    except SymbolicSizes:
        found = _symbolic_metadata_of(tensor)
    tensor._interned = found.to_keep()
    return found


def _symbolic_metadata_of(tensor: Any) -> TensorMetadata:
    shape = tuple([token(size) for size in tensor.shape])
    stride = tuple([token(size) for size in tensor.stride()])
    offset = token(tensor.storage_offset())
    return intern_symbolic(
        tensor.fake_mode.shape_env, shape, stride, tensor.dtype, tensor.fake_device, offset, flags_of(tensor)
    )


def intern_symbolic(
    shape_env: Any,
    shape: tuple,
    stride: tuple,
    dtype: torch.dtype,
    device: torch.device,
    offset: Any,
    flags: int,
) -> TensorMetadata:
    """Return the environment's unique metadata object for these values; static metadata if none is symbolic.

    Args:
        shape_env: the environment, or None.
        shape: sizes, each an integer or a token of the environment.
        stride: strides in elements, likewise.
        dtype: the tensor's dtype.
        device: its device.
        offset: its storage offset in elements, likewise.
        flags: see ``fake.tensors.metadata``.

    Raises:
        Unkeyable: a symbol belongs to another environment.
    """
    if shape_env is None:
        raise Unkeyable("symbolic shape")
    numbers = (*shape, *stride, offset)
    tokens = [number for number in numbers if type(number) is not int]
    if not tokens:
        return intern(shape, stride, dtype, device, offset, flags)
    if any(token.shape_env is not shape_env for token in tokens):
        raise Unkeyable("symbol of another shape environment")
    table = state_of(shape_env).metadata
    key = (shape, stride, dtype, device, offset, flags)
    found = table.get(key)
    if found is None:
        made = SymbolicMetadata()
        made.shape, made.stride, made.dtype, made.device, made.offset, made.flags = key
        made.symbols = frozenset().union(*[token.symbols for token in tokens])
        made.shape_env = shape_env
        made.pattern = None
        found = table.setdefault(key, made)
    return found


def current_metadata(metadata: TensorMetadata) -> TensorMetadata:
    """Return the tensor's metadata after symbols in it were replaced; unchanged if none was."""
    if type(metadata) is not SymbolicMetadata or metadata.symbols.isdisjoint(metadata.shape_env.replacements):
        return metadata
    shape_env = metadata.shape_env

    def current(number: Any) -> Any:
        return (
            number if type(number) is int else token_of_expression(shape_env.replace(number.expr), shape_env)
        )

    return intern_symbolic(
        shape_env,
        tuple(map(current, metadata.shape)),
        tuple(map(current, metadata.stride)),
        metadata.dtype,
        metadata.device,
        current(metadata.offset),
        metadata.flags,
    )


def number_of(value: Any) -> Any:
    """Return the integer itself, or a symbolic integer for a token."""
    return value if type(value) is int else value.symbol()


def is_symbolic_key(key: Any) -> bool:
    """Return whether a key mentions a symbol."""
    for part in key:
        kind = type(part)
        if kind is SymbolicMetadata or kind is SizeToken or (kind is tuple and is_symbolic_key(part)):
            return True
    return False


def symbols_of_key(key: Any) -> set[Any]:
    """Return all symbols that a key mentions, and those that have replaced them since."""
    found: set[Any] = set()
    for part in key:
        if isinstance(part, (SymbolicMetadata, SizeToken)):
            found |= part.symbols
            for symbol in part.symbols & part.shape_env.replacements.keys():
                found |= part.shape_env.replace(symbol).free_symbols
        elif type(part) is tuple:
            found |= symbols_of_key(part)
    return found
