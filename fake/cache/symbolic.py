"""Symbolic sizes in the dispatch cache.

Keys and recipes name a size by a :class:`SizeToken`, one object per expression of a shape environment. Everything here
belongs to one environment and lives on it: the guards that a miss recorded are recorded there, so a hit needs none.

``make_fx`` knows sizes by their nodes, and looks a size up where it first met its node. What is rebuilt in one trace
therefore shares no nodes with what was made outside of it, its inputs above all: else a size of a forward value would be
read from a tangent that happens to have the same one.

Outputs are made by a lazy clone of a prototype, which copies symbolic sizes without calling back into Python for
each of them; building the same tensor from its sizes costs twenty times as much. A recipe whose symbols have been
replaced since (an equality or a specialisation became known) is *stale*: it is dropped and the operator runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import _torch as _t
from ..metadata import TensorMetadata, intern
from ..symbols.node import LeanNode, adopt, lean_state
from ..tensor import SymbolicSizes, Unkeyable, flags_of, make_fake, plain_of, static_metadata_of
from .recipe import BUILDERS, Constant, Fresh, Mark, Rebuild, Sequence, View, follow

__all__ = [
    "SizeToken",
    "Stale",
    "SymbolicConstant",
    "SymbolicMetadata",
    "SymbolicState",
    "build_symbolic",
    "intern_symbolic",
    "is_symbolic_key",
    "metadata_of",
    "state_of",
    "symbols_of_key",
    "symbols_of_recipe",
    "token",
    "token_of_expression",
]


for _path in Path(__file__).parents[1].rglob("*.py"):
    if _path.parent.name in ("fake", "cache", "symbols"):
        _t.HIDDEN_FILES.add(str(_path))


class Stale(Exception):
    """A recipe mentions a symbol that has been replaced since."""


class SizeToken:
    """One expression of one shape environment; identity is equality."""

    __slots__ = ("expr", "node", "shape_env", "symbols")

    def __init__(self, node: Any, expr: Any, shape_env: Any) -> None:
        self.node, self.expr, self.shape_env = node, expr, shape_env
        self.symbols = expr.free_symbols

    def __repr__(self) -> str:
        return f"SizeToken({self.expr})"

    def symbol(self) -> torch.SymInt:
        """A symbolic integer with its own node: sharing nodes would tie sizes together that only happen to agree."""
        return torch.SymInt(_t.copy_node(self.node))


class SymbolicMetadata(TensorMetadata):
    """Metadata in which some sizes are tokens; the fields hold tokens."""

    __slots__ = ("shape_env", "symbols")

    shape_env: Any
    symbols: frozenset[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("symbolic metadata belongs to a live shape environment and cannot be pickled")


class SymbolicState:
    """What the cache keeps on one shape environment: tokens, metadata, and a table per operator.

    Attributes:
        settled: questions that the environment has answered, with guards if it needed any.
        facts, facts_version, facts_about: what it knew at a version, and of it about which symbols, for
            ``fake.cache.renamed``.
    """

    def __init__(self, shape_env: Any) -> None:
        self.tokens: dict[Any, SizeToken] = {}
        self.metadata: dict[Any, SymbolicMetadata] = {}
        self.tables: dict[Any, dict[Any, Any]] = {}
        self.size = 0
        self.settled: set[Any] = set()
        self.facts: list[Any] = []
        self.facts_version: Any = None
        self.facts_about: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict) -> SymbolicState:
        return SymbolicState(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SymbolicState, (None,))

    def table(self, func: Any, tensor_class: type) -> dict[Any, Any]:
        """The table of an operator, for tensors of one class."""
        key = (id(func), id(tensor_class))  # our class of fake tensors equals torch's
        found = self.tables.get(key)
        if found is None:
            found = self.tables.setdefault(key, {})
        return found

    def clear(self) -> None:
        """Drop all recipes (tokens and metadata stay: tensors hold them)."""
        self.tables.clear()
        self.size = 0


def state_of(shape_env: Any) -> SymbolicState:
    """The cache's state on a shape environment.

    Raises:
        Unkeyable: the environment records its events for replay, or validates translation: nothing may be skipped.
    """
    state = shape_env.__dict__.get("_fake_dispatch")
    if state is None:
        if shape_env.should_record_events or shape_env._translation_validation_enabled:
            raise Unkeyable("recording shape environment")
        _t.HIDDEN_FILES.tell_torch()
        state = shape_env.__dict__["_fake_dispatch"] = SymbolicState(shape_env)
    return state


def token(value: Any) -> Any:
    """An integer, or the token of a symbolic one (an integer again if its symbol has been specialised).

    Raises:
        Unkeyable: nested integers, and nodes that are not torch's.
    """
    if type(value) is int:
        return value
    node = value.node
    if type(node) is not LeanNode:
        if type(node) is not _t.SymNode:
            raise Unkeyable("symbolic shape")
        if node.shape_env is not None and lean_state(node.shape_env).adopts:
            adopt(value)
    expr = node.expr
    cached = node.__dict__.get("_fake_token")
    if cached is not None and cached.expr is expr:
        return cached
    if expr.is_number:
        return int(expr)
    shape_env = node.shape_env
    tokens = state_of(shape_env).tokens
    found = tokens.get(expr)
    if found is None:
        found = tokens[expr] = SizeToken(_t.copy_node(node), expr, shape_env)
    node.__dict__["_fake_token"] = found
    return found


def token_of_expression(expr: Any, shape_env: Any) -> Any:
    """An integer, or the token of an expression of backed symbols that may have no node yet."""
    if expr.is_number:
        return int(expr)
    tokens = state_of(shape_env).tokens
    found = tokens.get(expr)
    if found is None:
        hint = int(expr.xreplace(shape_env.backed_var_to_val))
        node = _t.SymNode(expr, shape_env, int, hint)
        if lean_state(shape_env).adopts:
            node.__class__ = LeanNode
        found = tokens[expr] = SizeToken(node, expr, shape_env)
        node.__dict__["_fake_token"] = found
    return found


def metadata_of(tensor: Any) -> TensorMetadata:
    """The interned metadata of a strided fake tensor, remembered on it.

    Raises:
        Unkeyable: constants, real tensors, sparse, nested and quantized tensors have none.
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
    """The one metadata object of an environment for these values; static metadata if none of them is symbolic.

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
        found = table.setdefault(key, made)
    return found


def _number(value: Any) -> Any:
    return value if type(value) is int else value.symbol()


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([_number(value) for value in values])


def _place(metadata: Any) -> tuple[Any, ...]:
    """Sizes, strides and offset, with nodes of their own."""
    return _numbers(metadata.shape), _numbers(metadata.stride), _number(metadata.offset)


def is_symbolic_key(key: Any) -> bool:
    """Whether a key mentions a symbol."""
    for part in key:
        kind = type(part)
        if kind is SymbolicMetadata or kind is SizeToken or (kind is tuple and is_symbolic_key(part)):
            return True
    return False


def symbols_of_key(key: Any) -> set[Any]:
    """All symbols that a key mentions, and those that have replaced them since."""
    found: set[Any] = set()
    for part in key:
        if isinstance(part, (SymbolicMetadata, SizeToken)):
            found |= part.symbols
            for symbol in part.symbols & part.shape_env.replacements.keys():
                found |= part.shape_env.replace(symbol).free_symbols
        elif type(part) is tuple:
            found |= symbols_of_key(part)
    return found


def symbols_of_recipe(recipe: Any) -> set[Any]:
    """All symbols that a recipe needs."""
    if isinstance(recipe, Sequence):
        return set().union(*[symbols_of_recipe(item) for item in recipe.items])
    if isinstance(recipe, SymbolicConstant):
        return set(recipe.value.symbols)
    return set(getattr(getattr(recipe, "metadata", None), "symbols", ()))


class SymbolicConstant(Constant):
    """A symbolic integer among the outputs (``value`` is its token)."""


def build_symbolic(recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    """Compile a recipe whose metadata is symbolic."""
    if type(recipe) is SymbolicConstant:
        return _build_constant(recipe)
    if type(recipe) is Fresh:
        return _build_fresh(recipe, tensor_class, mark)
    return _build_view(recipe, tensor_class, mark)


def _fresh_or_stale(owner: Any) -> Callable[[], None]:
    """A check that costs an integer comparison as long as nothing was replaced."""
    shape_env, symbols = owner.shape_env, owner.symbols
    seen = len(shape_env.replacements)
    if not symbols.isdisjoint(shape_env.replacements):
        raise Unkeyable("replaced symbol")

    def check() -> None:
        nonlocal seen
        now = len(shape_env.replacements)
        if now != seen:
            if not symbols.isdisjoint(shape_env.replacements):
                raise Stale
            seen = now

    return check


def _build_constant(recipe: Any) -> Rebuild:
    value = recipe.value
    check = _fresh_or_stale(value)

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        check()
        return value.symbol()

    return rebuild


def _build_fresh(recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    metadata = recipe.metadata
    check = _fresh_or_stale(metadata)
    prototype, made_in = _prototype(recipe), _t.current_trace()
    lazy_clone, device, interned = _t.variable_functions._lazy_clone, metadata.device, metadata.to_keep()

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal prototype, made_in
        check()
        trace = _t.current_trace()
        if trace != made_in:
            prototype, made_in = _prototype(recipe), trace
        return make_fake(lazy_clone(prototype), device, mode, interned, mark, tensor_class)

    return rebuild


def _prototype(recipe: Fresh) -> torch.Tensor:
    """A meta tensor with the sizes and the storage size of a recipe."""
    metadata: Any = recipe.metadata
    shape, stride, dtype = _numbers(metadata.shape), _numbers(metadata.stride), metadata.dtype
    try:
        with metadata.shape_env.suppress_guards():
            made = torch.empty_strided(shape, stride, dtype=dtype, device=_t.META_DEVICE)
            if metadata.offset == 0 and token(made.untyped_storage().nbytes()) is recipe.nbytes:
                return made
            # Sizes and strides give the same number in another form: (s0 - 1) * 4 + 4 for 4 * s0.
            whole = torch.empty(
                (_number(recipe.nbytes) // dtype.itemsize,), dtype=dtype, device=_t.META_DEVICE
            )
            if token(whole.untyped_storage().nbytes()) is recipe.nbytes:
                return whole.as_strided(shape, stride, _number(metadata.offset))
    except _t.GuardOnDataDependentSymNode as unknown:
        raise Unkeyable("data dependent symnode") from unknown
    raise Unkeyable("storage size of the output")


def _build_view(recipe: View, tensor_class: type, mark: Mark) -> Rebuild:
    metadata: Any = recipe.metadata
    if not recipe.same_dtype:
        raise Unkeyable("symbolic view with another dtype")
    check = _fresh_or_stale(metadata)
    place, made_in = _place(metadata), _t.current_trace()
    shape_env, path, device, interned = metadata.shape_env, recipe.path, metadata.device, metadata.to_keep()

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal place, made_in
        check()
        trace = _t.current_trace()
        if trace != made_in:
            place, made_in = _place(metadata), trace
        base = follow(path, args, kwargs)
        plain = base._plain
        if plain is None:
            with shape_env.suppress_guards():
                plain = plain_of(base)
        return make_fake(plain.as_strided(*place), device, mode, interned, mark, tensor_class)

    return rebuild


class _BuildersBySymbols:
    """Fresh tensors and views are compiled differently if their metadata is symbolic."""

    def __init__(self, static: Callable[..., Rebuild]) -> None:
        self.static = static

    def __call__(self, recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
        if type(recipe.metadata) is SymbolicMetadata:
            return build_symbolic(recipe, tensor_class, mark)
        return self.static(recipe, tensor_class, mark)


for _kind in (Fresh, View):
    BUILDERS[_kind] = _BuildersBySymbols(BUILDERS[_kind])
BUILDERS[SymbolicConstant] = build_symbolic
