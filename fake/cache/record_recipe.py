"""Turn the outputs of a real dispatch into a recipe, or refuse with a reason.

Aliasing is determined from the observed storages, not only from the schema. If the observation is ambiguous
(two arguments share the storage), the schema decides; if it does not, the call is not cached.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.cache.recipe import Argument, Constant, Fresh, Mark, Path, Recipe, Sequence, View, build, follow
from fake.cache.symbolic import metadata_of, token
from fake.cache.symbolic_recipe import SymbolicConstant
from fake.seam.dispatch import OpOverload, dispatch_key_set, has_symbols, storage_of
from fake.tensors.metadata import TensorMetadata
from fake.tensors.tensor import Unkeyable, flags_of

_CONSTANTS = (int, bool, float, type(None))


def describe(func: Any, args: Any, kwargs: Any, outputs: Any, tensor_class: type) -> Recipe:
    """Return the recipe of ``outputs``, given the arguments that produced them.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: the dispatch's result.
        tensor_class: the class of fake tensors that the engine serves.

    Raises:
        Unkeyable: the outputs cannot be rebuilt from the arguments' metadata alone.
    """
    return _Recorder(func, args, kwargs, tensor_class).describe(outputs)


class _Recorder:
    def __init__(self, func: Any, args: Any, kwargs: Any, tensor_class: type) -> None:
        self.func = func
        self.args, self.kwargs = args, kwargs
        self.tensor_class = tensor_class
        self.paths: list[tuple[Path, torch.Tensor]] = []
        for index, value in enumerate(args):
            self._add((index,), value)
        for name, value in kwargs.items():
            self._add((name,), value)
        self.by_storage: dict[int, list[Path]] = {}
        for path, tensor in self.paths:
            self.by_storage.setdefault(_storage(tensor), []).append(path)
        self.fresh: set[int] = set()

    def _add(self, path: Path, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.paths.append((path, value))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self._add((*path, index), item)

    def describe(self, output: Any) -> Recipe:
        kind = type(output)
        if kind is self.tensor_class:
            return self._describe_tensor(output)
        if kind in _CONSTANTS:
            return Constant(output)
        if isinstance(output, (tuple, list)):
            sequence = tuple if isinstance(output, tuple) else list
            return Sequence(sequence, tuple([self.describe(item) for item in output]))
        if kind is torch.SymInt:
            return SymbolicConstant(token(output))
        if kind in (torch.SymFloat, torch.SymBool):
            raise Unkeyable("symbolic output")
        raise Unkeyable("non-FakeTensor output")

    def _describe_tensor(self, output: Any) -> Recipe:
        same = [path for path, tensor in self.paths if tensor is output]
        if same:
            return Argument(self._choose(same, written=True))
        metadata = metadata_of(output)
        storage = _storage(output)
        candidates = self.by_storage.get(storage)
        if candidates is not None:
            path = self._choose(candidates, written=False)
            base = follow(path, self.args, self.kwargs)
            return View(metadata, path, base.dtype == output.dtype)
        if storage in self.fresh:
            raise Unkeyable("outputs alias each other")
        self.fresh.add(storage)
        nbytes = token(output.untyped_storage().nbytes())
        if type(nbytes) is not int and type(metadata) is TensorMetadata:
            # A write into part of a larger tensor, for example: its copy has the larger tensor's memory.
            raise Unkeyable("memory of a symbolic size behind a tensor of known sizes")
        return Fresh(metadata, nbytes)

    def _choose(self, paths: list[Path], *, written: bool) -> Path:
        """Return the one path that the schema names, if several share the tensor or its storage."""
        if len(paths) == 1:
            return paths[0]
        named: list[Any] = []
        if not isinstance(self.func, OpOverload):
            raise Unkeyable("ambiguous alias")
        for index, argument in enumerate(self.func._schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write == written:
                step: Any = argument.name if argument.kwarg_only or index >= len(self.args) else index
                named.append(step)
        chosen = [path for path in paths if path[0] in named]
        if len(chosen) != 1:
            raise Unkeyable("ambiguous alias")
        return chosen[0]


def _storage(tensor: torch.Tensor) -> int:
    found = storage_of(tensor)
    if found is None:
        raise Unkeyable(f"{tensor.layout} tensor")
    return found


def verify(recipe: Recipe, mark: Mark, mode: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Rebuild the outputs once, and compare what the metadata does not show.

    Args:
        recipe: the recipe of the call.
        mark: called on each rebuilt tensor.
        mode: the mode of the call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: the dispatch's result.

    Raises:
        Unkeyable: the rebuilt outputs differ from ``outputs``.
    """
    if isinstance(recipe, Sequence):
        for item, output in zip(recipe.items, outputs, strict=True):
            if isinstance(item, (Fresh, View)):
                _compare(build(item, type(output), mark)(mode, args, kwargs), output)
    elif isinstance(recipe, (Fresh, View)):
        _compare(build(recipe, type(outputs), mark)(mode, args, kwargs), outputs)


def _compare(made: Any, output: Any) -> None:
    if dispatch_key_set(made) != dispatch_key_set(output):
        raise Unkeyable("dispatch_key_set mismatch")
    if made.requires_grad != output.requires_grad or flags_of(made) != flags_of(output):
        raise Unkeyable("flags of the output")
    if has_symbols(made):
        return
    if (made.shape, made.stride(), made.storage_offset()) != (
        output.shape,
        output.stride(),
        output.storage_offset(),
    ):
        raise Unkeyable("layout of the output")
    if made.untyped_storage().nbytes() != output.untyped_storage().nbytes():
        raise Unkeyable("storage size of the output")
