"""Detect writes to overlapping memory that eager refuses.

A tensor that an operator writes to can be wrong in three ways: two of its elements share memory (``expand``),
it shares some elements with a tensor that is read, or it *is* a tensor that is read. Which of these a kernel
refuses is found by a trial (see :mod:`fake.kernels.trials`). The definitions are eager's
(``ATen/MemoryOverlap.cpp``): overlaps that are too hard to decide from sizes and strides pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fake.kernels.checks import extent
from fake.kernels.trials import SLACK, TensorSpec, Trial, attempt, trial_of
from fake.seam.dispatch import OpOverload, storage_of

Path = tuple[Any, ...]

INTERNAL, PARTIAL, FULL = ("internal", "partial", "full")

_PROBLEMS = {
    INTERNAL: "more than one element of the written-to tensor {name!r} refers to a single memory location. Please clone() "
    "the tensor before performing the operation.",
    PARTIAL: "some elements of the input tensor {other!r} and the written-to tensor {name!r} refer to a single memory "
    "location. Please clone() the tensor before performing the operation.",
    FULL: "the input tensor {other!r} and the written-to tensor {name!r} refer to the same memory. Please clone() the "
    "tensor before performing the operation.",
}


_refusals: dict[tuple[OpOverload, str, str, str], bool] = {}
"""Eager's answers by operator, kind of overlap, argument that is written, and argument that is read."""


def check_overlaps(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Raise if eager refuses the overlaps of a call.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: a written tensor overlaps with itself or with a tensor that is read.
    """
    for kind, name, other in overlaps_in(func, args, kwargs):
        if _refuses(func, kind, name, other, args, kwargs):
            raise RuntimeError(_message(func, kind, name, other))


def _refuses(func: OpOverload, kind: str, name: str, other: str, args: Any, kwargs: Any) -> bool:
    """Return whether eager refuses this kind of overlap; ``False`` if no trial is possible."""
    key = func, kind, name, other
    known = _refusals.get(key)
    if known is None:
        trial = trial_of(func, args, kwargs)
        existing = trial and _make_overlapping(trial, kind, name, other)
        if not trial or not existing:
            return False
        error = attempt(trial, existing=existing)
        known = error is not None and "unsupported operation: " in str(error)
        if known or error is None:
            _refusals[key] = known
    return known


def _make_overlapping(trial: Trial, kind: str, name: str, other: str) -> dict[str, Any] | None:
    """Return two overlapping arguments for a trial, or ``None`` if they are too small to overlap."""
    written, read = trial.values[name], trial.values[other]
    if not isinstance(written, TensorSpec) or not isinstance(read, TensorSpec):
        return None
    if kind == INTERNAL:
        long_dims = [d for d, size in enumerate(written.shape) if size > 1]
        if not long_dims:
            return None
        row = TensorSpec(
            written.dtype, tuple(1 if d == long_dims[0] else n for d, n in enumerate(written.shape))
        )
        return {name: row.make(0).expand(written.shape)}
    storage = torch.zeros(
        SLACK * (2 + math.prod(written.shape) + math.prod(read.shape)), dtype=torch.uint8, device="cpu"
    )
    step = 0 if kind == FULL else max(written.dtype.itemsize, read.dtype.itemsize) // read.dtype.itemsize
    return {name: written.make(0, storage), other: read.make(0, storage, step)}


def overlaps_in(func: OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every overlap in a call: its kind, the written argument, and the argument that is read.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    written, read = _written_and_read(func, args, kwargs)
    if any(tensor.numel() == 0 for _, tensor in (*written, *read)):
        return  # kernels check their arguments differently if there is nothing to compute
    for path, tensor in written:
        if _overlaps_itself(tensor):
            yield INTERNAL, path[-1], path[-1]
        for other_path, other in read:
            if storage_of(tensor) == storage_of(other):
                kind = _overlap_kind(tensor, other)
                if kind is not None:
                    yield kind, path[-1], other_path[-1]


def _written_and_read(func: OpOverload, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Return the written and the read tensors as ``(path, tensor)``; a path ends in the argument's name."""
    written: list[Any] = []
    read: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        start: Any = place if place < len(args) else argument.name
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        group = written if argument.alias_info is not None and argument.alias_info.is_write else read
        if isinstance(value, torch.Tensor):
            group.append(((start, argument.name), value))
        elif isinstance(value, list | tuple):
            group.extend(
                ((start, i, argument.name), item)
                for i, item in enumerate(value)
                if isinstance(item, torch.Tensor)
            )
    return written, read


def pairs_without_overlap(func: OpOverload, args: Any, kwargs: Any) -> tuple[tuple[Path, Path, str], ...]:
    """Return the pairs of arguments that must not share a storage, judged by metadata alone.

    Cache keys do not record whether two tensors share a storage, because it rarely matters: with equal sizes,
    an in-place operator may read what it writes.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        For each pair, the path of the written argument, the path of the other one, and the error message.
    """
    written, read = _written_and_read(func, args, kwargs)
    if any(tensor.numel() == 0 for _, tensor in (*written, *read)):
        return ()
    pairs = []
    for path, tensor in written:
        for other_path, other in read:
            kind = _overlap_kind(tensor, other)
            if kind is not None and _refuses(func, kind, path[-1], other_path[-1], args, kwargs):
                pairs.append((path[:-1], other_path[:-1], _message(func, kind, path[-1], other_path[-1])))
    return tuple(pairs)


def _message(func: OpOverload, kind: str, name: str, other: str) -> str:
    return f"{func}: unsupported operation: {_PROBLEMS[kind].format(name=name, other=other)}"


def _overlap_kind(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Return the kind of overlap of two tensors, assuming that they share a storage."""
    if 0 in a.shape or 0 in b.shape:
        return None
    first, second = _memory_layout(a), _memory_layout(b)
    return FULL if first == second else PARTIAL if may_overlap(first, second) else None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _memory_layout(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype.itemsize


def may_overlap(a: tuple[Any, Any, int, int], b: tuple[Any, Any, int, int]) -> bool:
    """Return whether two tensors (shape, strides, offset, item size) on one storage overlap in part.

    >>> row, whole = ((3,), (1,), 0, 4), ((2, 3), (3, 1), 0, 4)
    >>> may_overlap(row, whole), may_overlap(whole, whole), may_overlap(row, ((3,), (1,), 3, 4))
    (True, False, False)
    """
    if 0 in a[0] or 0 in b[0] or not _is_dense(*a[:2]) or not _is_dense(*b[:2]):
        return False
    (a_begin, a_end), (b_begin, b_end) = (
        (offset * size, extent(shape, strides, offset) * size) for shape, strides, offset, size in (a, b)
    )
    if (a_begin, a_end) == (b_begin, b_end):
        return tuple(a[1]) != tuple(b[1])
    return a_begin < b_end and b_begin < a_end


def _is_dense(shape: Any, strides: Any) -> bool:
    """Return whether the elements fill their range of memory exactly, in some order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
