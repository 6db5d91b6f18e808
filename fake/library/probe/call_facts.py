"""A call and its result, reduced to what a fake kernel may read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fake.library.probe.operator_parameters import literal, signature_for
from fake.seam import library as _torch


@dataclass(frozen=True)
class TensorFact:
    """A tensor without its data, with the methods of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFact:
        """Return the facts of a strided tensor."""
        return TensorFact(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def stride(self) -> tuple[int, ...]:
        """Like `torch.Tensor.stride`."""
        return self.strides

    def dim(self) -> int:
        """Like `torch.Tensor.dim`."""
        return len(self.shape)

    def numel(self) -> int:
        """Like `torch.Tensor.numel`."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def is_contiguous(self) -> bool:
        """Return whether the elements are in order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected and self.numel() != 0:
                    return False
                expected *= size
        return True


@dataclass(frozen=True)
class OutputFact:
    """One output of a call.

    Attributes:
        shape: the sizes; None for a size that other data changed.
        alias: the argument whose memory the output shares, or None.
    """

    shape: tuple[int | None, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alias: str | None = None


@dataclass(frozen=True)
class Facts:
    """Arguments by name, with tensors as `TensorFact`."""

    values: Mapping[str, Any]

    @property
    def tensors(self) -> Iterator[tuple[str, TensorFact]]:
        """Yield ``(expression, tensor)`` for each tensor; elements of a list are ``name[i]``."""
        for name, value in self.values.items():
            if isinstance(value, TensorFact):
                yield name, value
            elif isinstance(value, list):
                for index, element in enumerate(value):
                    if isinstance(element, TensorFact):
                        yield f"{name}[{index}]", element

    def structure(self) -> tuple[Any, ...]:
        """Return which arguments are present, and of what kind."""
        return tuple(sorted((name, _kind(value)) for name, value in self.values.items()))

    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Return the kind of each argument."""
        return tuple((name, _kind(value)[0]) for name, value in self.values.items())

    def categories(self) -> tuple[tuple[str, str], ...]:
        """Return the arguments that are neither tensors nor numbers, with their values."""
        return tuple(
            sorted(
                (name, literal(value) or repr(value))
                for name, value in self.values.items()
                if _kind(value)[0] == "category"
            )
        )

    def category_of(self, name: str) -> str:
        """Return one argument's category: its value if it is a flag, otherwise its kind, or ``absent``."""
        if name not in self.values:
            return "absent"
        kind = _kind(self.values[name])[0]
        value = self.values[name]
        return (literal(value) or repr(value)) if kind == "category" else kind

    def ranks(self) -> tuple[tuple[str, int], ...]:
        """Return the rank of each tensor."""
        return tuple((name, tensor.dim()) for name, tensor in self.tensors)

    def numbers(self) -> tuple[tuple[str, Any], ...]:
        """Return the numbers and the lists of integers, by name."""
        kinds = ("int", "ints", "float")
        return tuple(sorted((n, v) for n, v in self.values.items() if _kind(v)[0] in kinds))

    def dtypes(self) -> tuple[Any, ...]:
        """Return the dtypes of all tensors and dtype arguments."""
        given = tuple((n, v) for n, v in self.values.items() if isinstance(v, torch.dtype))
        return (tuple((n, t.dtype) for n, t in self.tensors), given)

    def has_empty(self) -> bool:
        """Return whether any tensor has no elements."""
        return any(t.numel() == 0 for _, t in self.tensors)

    def contiguous(self) -> bool:
        """Return whether every tensor is contiguous."""
        return all(t.is_contiguous() for _, t in self.tensors)

    def environment(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the names for evaluating an expression; absent arguments are None."""
        return {**dict.fromkeys(names), **self.values}


def _kind(value: Any) -> tuple[str, int]:
    if isinstance(value, TensorFact):
        return "tensor", 0
    if isinstance(value, bool) or value is None:
        return "category", 0
    if isinstance(value, (int, torch.SymInt)):
        return "int", 0
    if isinstance(value, (float, complex)):
        return "float", 0
    if isinstance(value, torch.dtype):
        return "dtype", 0
    if isinstance(value, list):
        return "tensors", len(value)
    if isinstance(value, tuple) and all(isinstance(v, (int, torch.SymInt)) for v in value):
        return "ints", 0
    return "category", 0


def abstract(value: Any) -> Any:
    """Replace an argument's tensors by their facts. Lists with tensors stay lists, others become tuples."""
    if isinstance(value, torch.Tensor):
        return TensorFact.of(value)
    if isinstance(value, (list, tuple)):
        inner = [abstract(v) for v in value]
        return inner if any(isinstance(v, TensorFact) for v in inner) else tuple(inner)
    return value


def parameter_names(op: Callable[..., Any]) -> list[str] | None:
    """Return the names of an operator's parameters, or None if only the kernel knows them."""
    signature = signature_for(op)
    return None if signature is None else list(signature.parameters)


def optional_parameters(op: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that have a default, as far as they are known."""
    signature = signature_for(op)
    if signature is None:
        return []
    return [n for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty]


def bind(names: Sequence[str] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; ``arg0``, ``arg1``... if the names are not known.

    Args:
        names: the parameters, or None.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    bound = {}
    for index, value in enumerate(args):
        bound[names[index] if names is not None and index < len(names) else f"arg{index}"] = value
    bound.update(kwargs)
    return bound


def facts_of(bound: Mapping[str, Any]) -> Facts:
    """Return the facts of bound arguments."""
    return Facts({name: abstract(value) for name, value in bound.items()})


def describe_outputs(result: Any, inputs: Mapping[str, Any]) -> tuple[OutputFact, ...] | None:
    """Return the outputs of a call, or None if one is not a strided tensor."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if not all(
        isinstance(o, torch.Tensor) and o.layout is torch.strided and not o.is_quantized for o in outputs
    ):
        return None
    storages: dict[Any, str] = {}
    for name, value in inputs.items():
        for leaf in _torch.pytree.tree_leaves(value):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.layout is torch.strided
                and leaf.untyped_storage().nbytes()
            ):
                storages[_torch.storage_of(leaf)] = name
    return tuple(
        OutputFact(tuple(o.shape), tuple(o.stride()), o.dtype, storages.get(_torch.storage_of(o)))
        for o in outputs
    )
