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

import sympy
import torch

from .. import _torch as _t
from ..native import load
from ..symbols.static import static_answer
from ..tensor import Unkeyable, make_fake
from .recipe import BUILDERS, Constant, Fresh, Mark, Rebuild, Sequence, View, follow
from .symbolic import SymbolicMetadata, number_of, state_of, token

__all__ = ["Stale", "SymbolicConstant", "build_symbolic", "symbols_of_recipe"]


NATIVE = load()
"""What copies a tensor with all that is known of its sizes onto another storage, if it was compiled (``fake.native``)."""

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


class _Lifetime:
    """Says that a recipe is stale once one of its symbols has been replaced.

    Attributes:
        seen: how many symbols were replaced when it was found fresh; while there are no more, nothing has to be asked.
    """

    __slots__ = ("seen", "shape_env", "symbols")

    def __init__(self, owner: Any) -> None:
        self.shape_env, self.symbols = owner.shape_env, owner.symbols
        if not self.symbols.isdisjoint(self.shape_env.replacements):
            raise Unkeyable("replaced symbol")
        self.seen = len(self.shape_env.replacements)

    def check(self) -> None:
        """Raise ``Stale``, or note that the recipe is fresh."""
        replacements = self.shape_env.replacements
        if not self.symbols.isdisjoint(replacements):
            raise Stale
        self.seen = len(replacements)


def _build_constant(recipe: Any) -> Rebuild:
    value = recipe.value
    life = _Lifetime(value)

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        if len(life.shape_env.replacements) != life.seen:
            life.check()
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
    life, shape_env = _Lifetime(metadata), metadata.shape_env
    prototype: Any = None
    made_in = -1
    lazy_clone, device, interned = _t.variable_functions._lazy_clone, metadata.device, metadata.to_keep()
    current_trace, like = _t.current_trace, NATIVE

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal prototype, made_in
        if len(shape_env.replacements) != life.seen:
            life.check()
        trace = current_trace()
        if trace != made_in:
            prototype, made_in = _prototype(recipe, _numbers_given(trace, args)), trace
        element = lazy_clone(prototype) if like is None else like(prototype, None)
        return make_fake(element, device, mode, interned, mark, tensor_class)

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
        _ask_ahead(made, metadata)
    return made


def _pattern(metadata: Any, place: tuple[Any, ...]) -> Any:
    """A meta tensor with the sizes of a view, to make views like; None without what does that."""
    if NATIVE is None:
        return None
    made = torch.empty((0,), dtype=metadata.dtype, device=_t.META_DEVICE).as_strided(*place)
    _ask_ahead(made, metadata)
    return made


def _ask_ahead(made: torch.Tensor, metadata: Any) -> None:
    """Have a tensor find out that it is contiguous, for all that are made like it: only where that needs no guard, and
    outside of traces, which would note the arithmetic."""
    if NATIVE is not None and not _t.current_trace() and _is_plainly_row_major(metadata):
        made.is_contiguous()


def _is_plainly_row_major(metadata: Any) -> bool:
    """Whether each stride is the product of the sizes behind it, and all symbolic sizes are greater than one."""
    expected: Any = 1
    for size, stride in zip(reversed(metadata.shape), reversed(metadata.stride), strict=True):
        length, step = (n if type(n) is int else n.expr for n in (size, stride))
        if step != expected:
            return False
        if type(length) is int:
            if length < 1:
                return False
        elif not static_answer(sympy.Gt(length, 1), metadata.shape_env):
            return False
        expected = expected * length
    return True


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
    life, shape_env = _Lifetime(metadata), metadata.shape_env
    place: Any = None
    pattern: Any = None
    made_in = -1
    path, device, interned = recipe.path, metadata.device, metadata.to_keep()
    current_trace, like = _t.current_trace, NATIVE
    index = path[0] if len(path) == 1 and type(path[0]) is int else None

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        nonlocal place, pattern, made_in
        if len(shape_env.replacements) != life.seen:
            life.check()
        trace = current_trace()
        if trace != made_in:
            place, made_in = _place(metadata, _numbers_given(trace, args)), trace
            pattern = _pattern(metadata, place)
        base = follow(path, args, kwargs) if index is None else args[index]
        element = base._plain
        if element is None:
            element = _plain_of(base)
        # ``detach`` and the like: the base's own plain tensor has these sizes already (one that ``_plain_of`` made
        # has none).
        if interned is None or base._interned is not interned or not _t.has_symbols(element):
            element = element.as_strided(*place) if like is None else like(pattern, element)
        return make_fake(element, device, mode, interned, mark, tensor_class)

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
