"""Run eager's CPU kernels on small real tensors to learn which arguments they accept.

Neither schemas nor meta kernels record what a kernel refuses: each kernel decides with a dtype macro or a
check of its own, and differently in each release of torch. So the kernel itself is called. A trial has the
dtypes, ranks, numbers, strings and sizes of the call, with large sizes and numbers reduced. Only ATen
operators are tried. Their tensors hold more memory than their sizes need, because some kernels write beyond
an ``out`` of a wrong dtype. The RNG state is restored.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fake.seam.dispatch import OpOverload, eager_execution, has_symbols

_SMALL_TENSORS, _SMALL_NUMBER, _SMALL_SIZE = 1024, 64, 8
SLACK = 16
"""Minimum number of bytes per element in a trial: the item size of the largest dtype."""

_UNCHANGED_TYPES = (bool, str, torch.dtype, torch.layout, torch.memory_format, type(None))
_UNTRIED_KERNELS = re.compile(
    "(?<!softmax_)backward|pin_memory|pinned|record_stream|::set_|::rename|_dual|::_assert|::_print|cuda|cudnn"
)
"""Kernels that trust their callers, or that change more than their arguments."""

_ONE_BASED_PIVOTS = re.compile("lu_solve|lu_unpack|ldl_solve")
"""Kernels that write before the start of their memory if a pivot is 0: LAPACK numbers pivots from 1."""

Fill = int


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor of a trial."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def make(self, fill: Fill, storage: torch.Tensor | None = None, offset: int = 0) -> torch.Tensor:
        """Return a tensor of this kind: identity matrix or ones if floating point, else ``fill``.

        Args:
            fill: the value of integers and booleans.
            storage: bytes to place the tensor in; allocated if ``None``.
            offset: where the tensor begins in ``storage``, in elements.
        """
        if storage is None:
            storage = torch.zeros(SLACK * (math.prod(self.shape) + 4), dtype=torch.uint8, device="cpu")
        values = storage.view(self.dtype)[offset : offset + math.prod(self.shape)].view(self.shape)
        with contextlib.suppress(NotImplementedError):  # some dtypes cannot be filled: they stay zero
            if self.dtype.is_floating_point or self.dtype.is_complex:
                (values.diagonal(dim1=-2, dim2=-1) if values.dim() > 1 else values).fill_(1)
            elif fill:
                values.fill_(1)
        return values


@dataclass(frozen=True)
class Trial:
    """The arguments of a call, with a :class:`TensorSpec` in place of each tensor.

    Attributes:
        func: the operator.
        values: the arguments by name; a :class:`TensorSpec`, or a tuple of them, for tensors.
    """

    func: OpOverload
    values: dict[str, Any]

    def fills(self) -> tuple[Fill, ...]:
        """Return the fill values of integer tensors to try, in order."""
        return (1,) if _ONE_BASED_PIVOTS.search(self.func._schema.name) else (0, 1)

    def tensors(self) -> dict[str, Any]:
        """Return the arguments that are tensors or lists of tensors."""
        return {name: v for name, v in self.values.items() if _specs_in(v)}

    def with_values(self, changed: dict[str, Any]) -> Trial:
        return Trial(self.func, {**self.values, **changed})

    def in_dtype(self, dtype: torch.dtype, names: Iterable[str]) -> Trial:
        """Return this trial with the named arguments in another dtype."""
        return self.with_values({name: _in_dtype(self.values[name], dtype) for name in names})


def trial_of(func: Any, args: Any, kwargs: Any) -> Trial | None:
    """Turn a call into a trial. Return ``None`` for other devices or layouts, symbolic sizes, or other types.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if (
        not isinstance(func, OpOverload)
        or func.namespace != "aten"
        or _UNTRIED_KERNELS.search(func._schema.name)
    ):
        return None
    values: dict[str, Any] = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            values[argument.name] = args[place]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
    try:
        found = {name: _spec_of(value) for name, value in values.items()}
    except _CannotTry:
        return None
    if found.get("pin_memory"):
        return None
    trial = Trial(func, found)
    if _is_small(found):
        return trial
    smaller = trial.with_values({name: _shrink(value) for name, value in found.items()})
    # Private kernels trust that numbers agree with sizes.
    private = func._schema.name.startswith("aten::_")
    agrees = all(v == smaller.values[n] for n, v in found.items() if not _specs_in(v))
    return smaller if agrees or not private else None


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a key that decides whether a kernel accepts the dtypes of a call.

    Calls that differ only in nonzero sizes and in numbers have equal keys, except that the key records
    whether a list of integers has only ones and zeros.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    return (func, *map(_key_part, args), *[(name, _key_part(value)) for name, value in kwargs.items()])


def attempt(trial: Trial, fill: Fill = 0, existing: dict[str, Any] | None = None) -> Exception | None:
    """Run a trial and return the exception that eager raises, or ``None`` if it succeeds.

    Args:
        trial: the call to make.
        fill: the value of integers and booleans in tensors.
        existing: arguments that exist already, by name.
    """
    with eager_execution():
        state = torch.get_rng_state()
        try:
            arguments = {name: _make_argument(value, fill) for name, value in trial.values.items()}
            trial.func(**arguments | (existing or {}))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return error
        finally:
            torch.set_rng_state(state)
    return None


class _CannotTry(Exception):
    """Raised for an argument that cannot be replaced in a trial."""


def _spec_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_nested:
            raise _CannotTry
        if has_symbols(value) or value.is_quantized or value.dtype.itemsize > SLACK:
            raise _CannotTry
        return TensorSpec(value.dtype, tuple(value.shape))
    if isinstance(value, _UNCHANGED_TYPES) or type(value) in (int, float, complex):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_spec_of, value))
    if isinstance(value, torch.device) and value.type == "cpu":
        return value
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return None
    raise _CannotTry


def _specs_in(value: Any) -> tuple[TensorSpec, ...]:
    if isinstance(value, TensorSpec):
        return (value,)
    return tuple(v for v in value if isinstance(v, TensorSpec)) if isinstance(value, tuple) else ()


def _key_part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Do not compare symbolic sizes: that would add a guard, or fail for unbacked ones.
        empty = not has_symbols(value) and 0 in value.shape
        return value.dtype, value.dim(), empty, value.device.type == "cpu"
    if isinstance(value, list | tuple):
        if value and type(value[0]) is not int:
            return frozenset(map(_key_part, value))
        # A kernel may delegate dilated calls, for example, to another kernel.
        return all(type(number) is int and number in (0, 1) for number in value)
    return value if isinstance(value, _UNCHANGED_TYPES) else type(value)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Convert a tensor kind, a number, or a dtype argument to another dtype."""
    if isinstance(value, TensorSpec):
        return TensorSpec(dtype, value.shape)
    if isinstance(value, tuple):
        return tuple(_in_dtype(v, dtype) if isinstance(v, TensorSpec) else v for v in value)
    if isinstance(value, torch.dtype):
        return dtype
    if isinstance(value, float | complex):
        real = abs(value)
        return real if dtype.is_floating_point else int(real) if math.isfinite(real) else 1
    return value


def _is_small(values: dict[str, Any]) -> bool:
    elements = sum(math.prod(k.shape) for value in values.values() for k in _specs_in(value))
    room = 1
    for value in values.values():
        numbers = [n for n in (value if isinstance(value, tuple) else (value,)) if type(n) in (int, float)]
        if any(abs(n) > _SMALL_NUMBER and math.isfinite(n) for n in numbers):
            return False
        room = max(room, math.prod(max(1, abs(n)) for n in numbers if type(n) is int))
    return elements * room <= _SMALL_TENSORS * _SMALL_NUMBER and elements <= _SMALL_TENSORS


def _shrink(value: Any) -> Any:
    """Clamp large sizes and numbers to a small value; equal values stay equal."""
    if isinstance(value, TensorSpec):
        return TensorSpec(value.dtype, tuple(min(n, _SMALL_SIZE) for n in value.shape))
    if isinstance(value, tuple):
        return tuple(map(_shrink, value))
    if type(value) in (int, float) and math.isfinite(value):
        return max(-_SMALL_SIZE, min(value, _SMALL_SIZE))
    return value


def _make_argument(value: Any, fill: Fill) -> Any:
    if isinstance(value, TensorSpec):
        return value.make(fill)
    return [_make_argument(v, fill) for v in value] if isinstance(value, tuple) else value
