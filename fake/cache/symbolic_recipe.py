"""Recipes with symbolic sizes.

``make_fx`` knows sizes by their nodes, and looks a size up where it first met its node. What is rebuilt in one trace
therefore shares no nodes with what was made outside of it, its inputs above all: else a size of a forward value would be
read from a tangent that happens to have the same one.

Outputs are made by a lazy clone of a prototype, which copies symbolic sizes without calling back into Python for
each of them; building the same tensor from its sizes costs twenty times as much. A recipe whose symbols have been
replaced since (an equality or a specialisation became known) is *stale*: it is dropped and the operator runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch as _t
from ..tensor import Unkeyable, make_fake
from .recipe import BUILDERS, Constant, Fresh, Mark, Rebuild, Sequence, View, follow
from .symbolic import SymbolicMetadata, number_of, state_of, token

__all__ = ["Stale", "SymbolicConstant", "build_symbolic", "symbols_of_recipe"]


NOTHING_GIVEN: dict[Any, Any] = {}


class Stale(Exception):
    """A recipe mentions a symbol that has been replaced since."""


class SymbolicConstant(Constant):
    """A symbolic integer among the outputs (``value`` is its token)."""


def symbols_of_recipe(recipe: Any) -> set[Any]:
    """All symbols that a recipe needs."""
    if isinstance(recipe, Sequence):
        return set().union(*[symbols_of_recipe(item) for item in recipe.items])
    if isinstance(recipe, SymbolicConstant):
        return set(recipe.value.symbols)
    return set(getattr(getattr(recipe, "metadata", None), "symbols", ()))


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


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([number_of(value) for value in values])


def _place(metadata: Any, given: dict[Any, Any] = NOTHING_GIVEN) -> tuple[Any, ...]:
    """Sizes, strides and offset, with nodes of their own, or those that the call gave as numbers."""
    shape = tuple([given[value] if value in given else number_of(value) for value in metadata.shape])
    return shape, _numbers(metadata.stride), number_of(metadata.offset)


def _numbers_given(trace: int, args: Any) -> dict[Any, Any]:
    """The symbolic numbers among the arguments of a call that is traced, by their tokens.

    A size that the caller computed (``x.expand(a + b, n)``) is known to ``make_fx`` by that number's node: the result
    has the same one, as if the operator had run, so that nobody reads it off the result.
    """
    if not trace:
        return NOTHING_GIVEN
    numbers = [
        n
        for a in args
        for n in (a if type(a) in (list, tuple, torch.Size) else (a,))
        if type(n) is torch.SymInt
    ]
    return {token(n): n for n in reversed(numbers)} if numbers else NOTHING_GIVEN


def _build_fresh(recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    metadata = recipe.metadata
    check = _fresh_or_stale(metadata)
    prototype: Any = None
    made_in = -1
    lazy_clone, device, interned = _t.variable_functions._lazy_clone, metadata.device, metadata.to_keep()

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal prototype, made_in
        check()
        trace = _t.current_trace()
        if trace != made_in:
            prototype, made_in = _prototype(recipe, _numbers_given(trace, args)), trace
        return make_fake(lazy_clone(prototype), device, mode, interned, mark, tensor_class)

    return rebuild


def _prototype(recipe: Fresh, given: dict[Any, Any] = NOTHING_GIVEN) -> torch.Tensor:
    """A meta tensor with the sizes and the storage size of a recipe; the same one for all equal recipes of a trace.

    The storage is resized to its size in bytes and the sizes are written over it as they are: nothing is computed,
    while torch derives the size of a storage from sizes and strides, with a question for each.
    """
    metadata: Any = recipe.metadata
    known = state_of(metadata.shape_env).prototypes_of(_t.current_trace())
    key = (metadata.shape, metadata.stride, metadata.offset, recipe.nbytes, metadata.dtype)
    made = known.get(key)
    if made is None:
        empty = torch.empty((0,), dtype=metadata.dtype, device=_t.META_DEVICE)
        _t.resize_storage(empty, number_of(recipe.nbytes))
        made = known[key] = empty.as_strided(*_place(metadata, given))
    return made


def _over(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on a storage: with sizes that are known, ``set_`` asks nothing of symbolic ones."""
    return torch.empty((0,), dtype=dtype, device=_t.META_DEVICE).set_(storage, 0, (0,), (1,))


def _plain_of(base: Any) -> torch.Tensor:
    """A plain meta tensor over the storage of a fake one, to set the sizes of views on."""
    plain = base._plain
    if plain is None:
        with _t.disable_torch_dispatch():
            plain = base._plain = _over(base.untyped_storage(), base.dtype)
    return plain


def _build_view(recipe: View, tensor_class: type, mark: Mark) -> Rebuild:
    metadata: Any = recipe.metadata
    if not recipe.same_dtype:
        raise Unkeyable("symbolic view with another dtype")
    check = _fresh_or_stale(metadata)
    place: Any = None
    made_in = -1
    path, device, interned = recipe.path, metadata.device, metadata.to_keep()

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal place, made_in
        check()
        trace = _t.current_trace()
        if trace != made_in:
            place, made_in = _place(metadata, _numbers_given(trace, args)), trace
        base = follow(path, args, kwargs)
        plain = base._plain
        if plain is None:
            plain = _plain_of(base)
        elif interned is not None and base._interned is interned and _t.has_symbols(plain):
            # ``detach`` and the like: the base's own plain tensor has these sizes already (one that ``_plain_of`` made
            # has none).
            return make_fake(plain, device, mode, interned, mark, tensor_class)
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
