"""Recipes for rebuilding an operator's outputs without running anything.

A *recipe* is a frozen description (it can be compared, pickled and stored on disk). :func:`build` compiles it
to a closure ``rebuild(mode, args, kwargs) -> outputs``. Outputs are fresh tensors, views of an argument, an
argument itself, plain values, and tuples or lists of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fake.seam import dispatch
from fake.tensors._torch_devices import allow_cuda
from fake.tensors.metadata import TensorMetadata
from fake.tensors.tensor import DEVICE_ATTRIBUTE, make_fake, plain_of

Path = tuple[Any, ...]
"""Where an argument is: ``(2,)`` is ``args[2]``, ``(2, 0)`` its first item, ``("out",)`` the keyword ``out``."""

Rebuild = Callable[[Any, Any, Any], Any]
Mark = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Fresh:
    """A tensor with its own storage of ``nbytes``."""

    metadata: TensorMetadata
    nbytes: Any


@dataclass(frozen=True)
class View:
    """A tensor over the storage of the argument at ``path``; ``same_dtype`` allows the fast path."""

    metadata: TensorMetadata
    path: Path
    same_dtype: bool


@dataclass(frozen=True)
class Argument:
    """The argument at ``path`` itself (in-place operators, ``out=``)."""

    path: Path


@dataclass(frozen=True)
class Constant:
    """A value that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class Sequence:
    """A tuple or a list of recipes."""

    type: type
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Apart:
    """A recipe for calls in which pairs of arguments share no storage; if a pair does, the call is refused.

    Attributes:
        pairs: two paths and an error message each.
    """

    recipe: Any
    pairs: tuple[tuple[Path, Path, str], ...]


Recipe = Fresh | View | Argument | Constant | Sequence | Apart


def follow(path: Path, args: Any, kwargs: Any) -> Any:
    """Return the argument at a path.

    Args:
        path: see `Path`.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
    """
    value = kwargs[path[0]] if type(path[0]) is str else args[path[0]]
    for step in path[1:]:
        value = value[step]
    return value


def build(recipe: Recipe, tensor_class: type, mark: Mark) -> Rebuild:
    """Compile a recipe to a closure.

    Args:
        tensor_class: the exact class of the tensors to make.
        mark: makes access to the data pointer of a new tensor raise or warn (a setting of the mode).
    """
    return BUILDERS[type(recipe)](recipe, tensor_class, mark)


def _build_fresh(recipe: Fresh, tensor_class: type, mark: Mark) -> Rebuild:
    metadata = recipe.metadata
    device = metadata.device
    if device.type == "cuda":
        allow_cuda()  # the recipe may come from another process
    interned = metadata.to_keep()
    make_element = _element_maker(recipe)
    make = dispatch.make_subclass

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a call. Args: the mode, and the operator's arguments."""
        element = make_element()
        made: Any = make(tensor_class, element, False, dispatch_device=True, device_for_backend_keys=device)
        mark(made)
        made.fake_mode = mode
        made._fake_device = device
        made._interned = interned
        made._plain = element
        return made

    if DEVICE_ATTRIBUTE == "_fake_device":
        return rebuild
    return lambda mode, args, kwargs: make_fake(
        make_element(), device, mode, metadata.to_keep(), mark, tensor_class
    )


def _element_maker(recipe: Fresh) -> Callable[[], torch.Tensor]:
    """Return the fastest way to make a meta tensor with a recipe's layout and storage size."""
    metadata, nbytes = recipe.metadata, recipe.nbytes
    shape, stride, dtype, offset = metadata.shape, metadata.stride, metadata.dtype, metadata.offset
    prototype = torch.empty_strided(shape, stride, dtype=dtype, device=dispatch.META_DEVICE)
    # The key includes whether the Python dispatcher is on: `clone` is then Python, and ten times slower.
    if offset == 0 and not dispatch.is_python_dispatcher_enabled():
        copy = prototype.clone()
        if copy.stride() == stride and copy.untyped_storage().nbytes() == nbytes:
            return prototype.clone
    if offset == 0 and prototype.untyped_storage().nbytes() == nbytes:
        return partial(
            dispatch.variable_functions.empty_strided, shape, stride, dtype=dtype, device=dispatch.META_DEVICE
        )

    def make_part() -> torch.Tensor:
        whole = torch.empty((nbytes // dtype.itemsize,), dtype=dtype, device=dispatch.META_DEVICE)
        return whole.as_strided(shape, stride, offset)

    return make_part


def _build_view(recipe: View, tensor_class: type, mark: Mark) -> Rebuild:
    metadata = recipe.metadata
    shape, stride, device, offset = metadata.shape, metadata.stride, metadata.device, metadata.offset
    if not recipe.same_dtype:
        return _build_reinterpreting_view(recipe, tensor_class, mark)
    make = dispatch.make_subclass
    if DEVICE_ATTRIBUTE != "_fake_device" or len(recipe.path) != 1 or type(recipe.path[0]) is str:
        path = recipe.path

        def rebuild_nested(mode: Any, args: Any, kwargs: Any) -> Any:
            """Return the outputs of a call. Args: the mode, and the operator's arguments."""
            element = plain_of(follow(path, args, kwargs)).as_strided(shape, stride, offset)
            return make_fake(element, device, mode, metadata.to_keep(), mark, tensor_class)

        return rebuild_nested
    index = recipe.path[0]
    interned = metadata.to_keep()

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a call. Args: the mode, and the operator's arguments."""
        base = args[index]
        element = (base._plain if base._plain is not None else plain_of(base)).as_strided(
            shape, stride, offset
        )
        made: Any = make(tensor_class, element, False, dispatch_device=True, device_for_backend_keys=device)
        mark(made)
        made.fake_mode = mode
        made._fake_device = device
        made._interned = interned
        made._plain = element
        return made

    return rebuild


def _build_reinterpreting_view(recipe: View, tensor_class: type, mark: Mark) -> Rebuild:
    metadata, path = recipe.metadata, recipe.path

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a call. Args: the mode, and the operator's arguments."""
        base = follow(path, args, kwargs)
        element = torch.empty((0,), dtype=metadata.dtype, device=dispatch.META_DEVICE)
        with dispatch.disable_torch_dispatch():
            element.set_(base.untyped_storage(), metadata.offset, metadata.shape, metadata.stride)
        return make_fake(element, metadata.device, mode, metadata.to_keep(), mark, tensor_class)

    return rebuild


def _build_argument(recipe: Argument, tensor_class: type, mark: Mark) -> Rebuild:
    path = recipe.path
    if len(path) == 1 and type(path[0]) is int:
        index = path[0]
        return lambda mode, args, kwargs: args[index]
    return lambda mode, args, kwargs: follow(path, args, kwargs)


def _build_constant(recipe: Constant, tensor_class: type, mark: Mark) -> Rebuild:
    value = recipe.value
    return lambda mode, args, kwargs: value


def _build_sequence(recipe: Sequence, tensor_class: type, mark: Mark) -> Rebuild:
    parts = [build(item, tensor_class, mark) for item in recipe.items]
    if recipe.type is tuple:
        if len(parts) == 2:
            first, second = parts
            return lambda mode, args, kwargs: (first(mode, args, kwargs), second(mode, args, kwargs))
        return lambda mode, args, kwargs: tuple([part(mode, args, kwargs) for part in parts])
    return lambda mode, args, kwargs: [part(mode, args, kwargs) for part in parts]


def _build_apart(recipe: Apart, tensor_class: type, mark: Mark) -> Rebuild:
    inner, pairs = build(recipe.recipe, tensor_class, mark), recipe.pairs

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a call. Args: the mode, and the operator's arguments."""
        for first, second, problem in pairs:
            a, b = follow(first, args, kwargs), follow(second, args, kwargs)
            if a is b or dispatch.storage_of(a) == dispatch.storage_of(b):
                raise RuntimeError(problem)
        return inner(mode, args, kwargs)

    return rebuild


BUILDERS: dict[type, Callable[[Any, type, Mark], Rebuild]] = {
    Fresh: _build_fresh,
    View: _build_view,
    Argument: _build_argument,
    Constant: _build_constant,
    Sequence: _build_sequence,
    Apart: _build_apart,
}


class Unbuilt:
    """A recipe from disk: compiled at first use, in place in its table."""

    __slots__ = ("key", "recipe", "table", "tensor_class")

    def __init__(self, recipe: Recipe, tensor_class: type, table: dict[Any, Any], key: Any) -> None:
        self.recipe, self.tensor_class, self.table, self.key = recipe, tensor_class, table, key

    def __call__(self, mode: Any, args: Any, kwargs: Any) -> Any:
        rebuild = self.table[self.key] = build(self.recipe, self.tensor_class, mark_of(mode))
        return rebuild(mode, args, kwargs)


def mark_of(mode: Any) -> Mark:
    """Return what the mode does when the data pointer of a fake tensor is read: warn or raise."""
    return dispatch.warn_on_data_ptr if mode._allow_unsafe_data_ptr_access else dispatch.throw_on_data_ptr
