"""Recipes with symbolic sizes, for when the sizes' nodes are not observed (see
``links.py`` for when they are).

Outputs are made from a *pattern*, a meta tensor with the recipe's sizes. torch stores with a tensor's
symbolic sizes what it has computed about them (contiguity, their product), and copies all that when it
detaches a tensor. The copy is then put on a new storage, or on that of the argument that it is a view of.
Building the same tensor from its sizes costs twenty times as much, and recomputes everything in Python.

A recipe is *stale* if one of its symbols has been replaced since (an equality or a specialization became
known). It is dropped, and the operator runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fake.cache.recipe import BUILDERS, Constant, Fresh, Mark, Rebuild, Sequence, View, follow
from fake.cache.symbolic import SymbolicMetadata, number_of, state_of
from fake.seam import dispatch
from fake.seam.dispatch import META_DEVICE, make_subclass, resize_storage, variable_functions
from fake.tensors.tensor import DEVICE_ATTRIBUTE, Unkeyable, inference_mode, make_fake, plain_of

IS_INFERENCE = 4
"""The bit of inference tensors in the flags of metadata."""


class Stale(Exception):
    """A recipe mentions a symbol that has since been replaced."""


class SymbolicConstant(Constant):
    """A symbolic integer among the outputs (``value`` is its token)."""


def symbols_of_recipe(recipe: Any) -> set[Any]:
    """Return all symbols that a recipe needs."""
    if isinstance(recipe, Sequence):
        return set().union(*[symbols_of_recipe(item) for item in recipe.items])
    if isinstance(recipe, SymbolicConstant):
        return set(recipe.value.symbols)
    return set(getattr(getattr(recipe, "metadata", None), "symbols", ()))


def build_symbolic(recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    """Compile a recipe whose metadata is symbolic.

    Args:
        recipe: a fresh tensor, a view or a symbolic number.
        tensor_class: the class of the fake tensors to make.
        mark: called on each new tensor.

    Returns:
        ``rebuild(mode, args, kwargs)``, which raises `Stale` once a symbol of the recipe has been replaced.
    """
    if type(recipe) is SymbolicConstant:
        return _build_constant(recipe)
    if type(recipe) is Fresh:
        return _build_fresh(recipe, tensor_class, mark)
    return _build_view(recipe, tensor_class, mark)


class StalenessCheck:
    """Detects that a recipe is stale because one of its symbols has been replaced.

    Attributes:
        seen: the number of replaced symbols at the last check; while it is the same, no check is needed.
    """

    __slots__ = ("seen", "shape_env", "symbols")

    def __init__(self, owner: Any) -> None:
        self.shape_env, self.symbols = owner.shape_env, owner.symbols
        if not self.symbols.isdisjoint(self.shape_env.replacements):
            raise Unkeyable("replaced symbol")
        self.seen = len(self.shape_env.replacements)

    def check(self) -> None:
        """Raise ``Stale``, or note that the recipe is current."""
        replacements = self.shape_env.replacements
        if len(replacements) != self.seen:
            if not self.symbols.isdisjoint(replacements):
                raise Stale
            self.seen = len(replacements)


def _build_constant(recipe: Any) -> Rebuild:
    value = recipe.value
    staleness = StalenessCheck(value)

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the number of a call. Args: the mode, and the operator's arguments. Raises ``Stale`` if a
        symbol was replaced."""
        staleness.check()
        return value.symbol()

    return rebuild


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([number_of(value) for value in values])


def _geometry(metadata: Any) -> tuple[Any, ...]:
    """Return sizes, strides and offset, with new nodes."""
    return _numbers(metadata.shape), _numbers(metadata.stride), number_of(metadata.offset)


def _maker(metadata: Any, tensor_class: type, mark: Mark) -> Callable[..., Any]:
    """Return ``make(mode, pattern, plain)``: a tensor like a pattern, on the storage of a plain tensor.

    The tensor keeps ``plain``, to make views from.
    """
    device, interned = metadata.device, metadata.to_keep()
    copy, replace_storage, detach = make_subclass, dispatch.replace_storage, variable_functions.detach

    def make(mode: Any, pattern: torch.Tensor, plain: torch.Tensor) -> Any:
        """Return the tensor. Args: its mode, a meta tensor with its sizes and strides,
        and one with its storage."""
        moved = detach(pattern)
        replace_storage(moved, plain)  # not of the fake tensor: since 2.14 torch asks for the devices of both
        made: Any = copy(tensor_class, moved, False, dispatch_device=True, device_for_backend_keys=device)
        mark(made)
        made.fake_mode = mode
        setattr(made, DEVICE_ATTRIBUTE, device)
        made._interned = interned
        made._plain = plain
        return made

    return make


def _build_fresh(recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    metadata = recipe.metadata
    staleness, shape_env = StalenessCheck(metadata), metadata.shape_env
    pattern: Any = None
    storage: Any = None
    is_new = False
    lazy_clone, is_view_tracking_off = variable_functions._lazy_clone, dispatch.is_view_tracking_off
    make = _maker(metadata, tensor_class, mark)

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the tensor of a call. Args: the mode, and the operator's arguments. Raises ``Stale`` if a
        symbol was replaced."""
        nonlocal pattern, storage, is_new
        if len(shape_env.replacements) != staleness.seen:
            staleness.check()
        if pattern is None:
            pattern, storage = _prototype(recipe)
            is_new = True
        elif is_new:
            is_new = False
            _precompute_contiguity(pattern, metadata)
        if not is_view_tracking_off():
            tensor = lazy_clone(pattern)
            return make_fake(tensor, metadata.device, mode, metadata.to_keep(), mark, tensor_class)
        plain = lazy_clone(storage)
        return make(mode, pattern, plain)

    return rebuild


def empty_storage(recipe: Fresh) -> torch.Tensor:
    """Return an empty meta tensor on a storage of a recipe's size.

    The storage is resized to its size in bytes, and sizes are set on it without computing anything. torch
    would derive the storage size from sizes and strides, with an evaluation for each.
    """
    storage = torch.empty((0,), dtype=recipe.metadata.dtype, device=META_DEVICE)
    resize_storage(storage, number_of(recipe.nbytes))
    return storage


def inference_context(metadata: Any) -> AbstractContextManager[Any]:
    """Return the context in which to make tensors with this metadata."""
    return inference_mode(bool(metadata.flags & IS_INFERENCE))


def _prototype(recipe: Fresh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a meta tensor with a recipe's sizes and storage size, and an empty one on the same storage;
    shared by all equal recipes of an environment."""
    metadata: Any = recipe.metadata
    known = state_of(metadata.shape_env).prototypes
    key = (metadata.shape, metadata.stride, metadata.offset, recipe.nbytes, metadata.dtype, metadata.flags)
    made = known.get(key)
    if made is None:
        with inference_context(metadata):
            storage = empty_storage(recipe)
            made = known[key] = storage.as_strided(*_geometry(metadata)), storage
    return made


def _pattern(metadata: Any, geometry: tuple[Any, ...]) -> Any:
    """Return a meta tensor with a view's sizes, as its pattern;
    None for views that are not made from a pattern.

    Bits such as the conjugate bit come from the base,
    and torch would check a symbolic offset for being negative.
    """
    if metadata.flags & ~IS_INFERENCE or metadata.dtype.is_complex or type(metadata.offset) is not int:
        return None
    with inference_context(metadata):
        return torch.empty((0,), dtype=metadata.dtype, device=META_DEVICE).as_strided(*geometry)


def _precompute_contiguity(made: torch.Tensor, metadata: Any) -> None:
    """Make a pattern compute that it is contiguous, for all copies of it, if that needs no guard. This is
    done at its second use: many are used only once."""
    if _is_plainly_row_major(metadata):
        made.is_contiguous()


def _is_plainly_row_major(metadata: Any) -> bool:
    """Return whether each stride is the product of the sizes behind it,
    and all symbolic sizes are greater than one."""
    expected: Any = 1
    for size, stride in zip(reversed(metadata.shape), reversed(metadata.stride), strict=True):
        length, step = (n if type(n) is int else n.expr for n in (size, stride))
        if step != expected:
            return False
        if type(length) is int:
            if length < 1:
                return False
        elif not metadata.shape_env.bound_sympy(length).lower > 1:
            return False
        expected = expected * length
    return True


def _build_view(recipe: View, tensor_class: type, mark: Mark) -> Rebuild:
    metadata: Any = recipe.metadata
    if not recipe.same_dtype:
        raise Unkeyable("symbolic view with another dtype")
    staleness, shape_env = StalenessCheck(metadata), metadata.shape_env
    geometry: Any = None
    pattern: Any = None
    is_new = False
    path = recipe.path
    is_view_tracking_off, make = dispatch.is_view_tracking_off, _maker(metadata, tensor_class, mark)
    index = path[0] if len(path) == 1 and type(path[0]) is int else None

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the view of a call. Args: the mode, and the operator's arguments. Raises ``Stale`` if a
        symbol was replaced."""
        nonlocal geometry, pattern, is_new
        if len(shape_env.replacements) != staleness.seen:
            staleness.check()
        if geometry is None:
            geometry = _geometry(metadata)
            pattern = _pattern(metadata, geometry)
            is_new = pattern is not None
        elif is_new:
            is_new = False
            _precompute_contiguity(pattern, metadata)
        base = follow(path, args, kwargs) if index is None else args[index]
        if pattern is None or not is_view_tracking_off():
            element = plain_of(base).as_strided(*geometry)
            return make_fake(element, metadata.device, mode, metadata.to_keep(), mark, tensor_class)
        return make(mode, pattern, plain_of(base))

    return rebuild


def _build_by_symbols(static: Callable[..., Rebuild], recipe: Any, tensor_class: type, mark: Mark) -> Rebuild:
    """Compile fresh tensors and views, by another function if their metadata is symbolic."""
    build = build_symbolic if type(recipe.metadata) is SymbolicMetadata else static
    return build(recipe, tensor_class, mark)


for _kind in (Fresh, View):
    BUILDERS[_kind] = functools.partial(_build_by_symbols, BUILDERS[_kind])
BUILDERS[SymbolicConstant] = build_symbolic
