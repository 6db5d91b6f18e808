"""Writing to memory that is read, or written twice: which operators refuse it, and when it happens.

Three things can be wrong with a tensor that an operator writes to: two of its elements are one (``expand``), it shares some
elements with a tensor that is read, or it *is* a tensor that is read. Each kernel decides which of these it refuses, and is
asked (see :mod:`fake.kernels.trials`). The definitions are eager's
(``ATen/MemoryOverlap.cpp``): what is too hard to tell from sizes and strides passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fake.kernels.checks import extent
from fake.kernels.trials import SLACK, Kind, Trial, attempt, trial_of
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


_known: dict[tuple[OpOverload, str, str, str], bool] = {}
"""What eager said: of an operator, a kind of overlap, the argument that is written to, and the one that is read."""


def check_overlaps(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Refuse what eager refuses.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: the written tensor overlaps with itself or with what is read.
    """
    for kind, name, other in kinds_of(func, args, kwargs):
        if _refuses(func, kind, name, other, args, kwargs):
            raise RuntimeError(_problem(func, kind, name, other))


def _refuses(func: OpOverload, kind: str, name: str, other: str, args: Any, kwargs: Any) -> bool:
    """Whether eager refuses one kind of overlap of two arguments. What it cannot be asked, it does not refuse."""
    key = func, kind, name, other
    known = _known.get(key)
    if known is None:
        trial = trial_of(func, args, kwargs)
        made = trial and _overlapping(trial, kind, name, other)
        if not trial or not made:
            return False
        error = attempt(trial, made=made)
        known = error is not None and "unsupported operation: " in str(error)
        if known or error is None:
            _known[key] = known
    return known


def _overlapping(trial: Trial, kind: str, name: str, other: str) -> dict[str, Any] | None:
    """Two arguments of a trial that overlap; ``None`` if they are too small to."""
    written, read = trial.values[name], trial.values[other]
    if not isinstance(written, Kind) or not isinstance(read, Kind):
        return None
    if kind == INTERNAL:
        long = [d for d, size in enumerate(written.shape) if size > 1]
        if not long:
            return None
        row = Kind(written.dtype, tuple(1 if d == long[0] else n for d, n in enumerate(written.shape)))
        return {name: row.make(0).expand(written.shape)}
    storage = torch.zeros(
        SLACK * (2 + math.prod(written.shape) + math.prod(read.shape)), dtype=torch.uint8, device="cpu"
    )
    step = 0 if kind == FULL else max(written.dtype.itemsize, read.dtype.itemsize) // read.dtype.itemsize
    return {name: written.make(0, storage), other: read.make(0, storage, step)}


def kinds_of(func: OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[str, str, str]]:
    """Every overlap in a call: its kind, the argument that is written to, and the one that is read.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    written, read = _written_and_read(func, args, kwargs)
    if any(tensor.numel() == 0 for _, tensor in (*written, *read)):
        return  # kernels look at their arguments differently if there is nothing to do
    for path, tensor in written:
        if _overlaps_itself(tensor):
            yield INTERNAL, path[-1], path[-1]
        for other_path, other in read:
            if storage_of(tensor) == storage_of(other):
                kind = _kind_on_one_storage(tensor, other)
                if kind is not None:
                    yield kind, path[-1], other_path[-1]


def _written_and_read(func: OpOverload, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """``(path, tensor)`` of what is written and what is read; a path leads to the tensor and ends in the argument's name."""
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


def pairs_to_watch(func: OpOverload, args: Any, kwargs: Any) -> tuple[tuple[Path, Path, str], ...]:
    """The arguments that must not share a storage, judged by their metadata alone, with what to say if they do.

    That two tensors share one is not in any cache key, because it hardly ever matters: with equal sizes, an in-place
    operator may read what it writes.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The path of a written argument, that of another one, and the message, for each pair.
    """
    written, read = _written_and_read(func, args, kwargs)
    if any(tensor.numel() == 0 for _, tensor in (*written, *read)):
        return ()
    pairs = []
    for path, tensor in written:
        for other_path, other in read:
            kind = _kind_on_one_storage(tensor, other)
            if kind is not None and _refuses(func, kind, path[-1], other_path[-1], args, kwargs):
                pairs.append((path[:-1], other_path[:-1], _problem(func, kind, path[-1], other_path[-1])))
    return tuple(pairs)


def _problem(func: OpOverload, kind: str, name: str, other: str) -> str:
    return f"{func}: unsupported operation: {_PROBLEMS[kind].format(name=name, other=other)}"


def _kind_on_one_storage(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """What overlaps if these two are on one storage."""
    if 0 in a.shape or 0 in b.shape:
        return None
    first, second = _place(a), _place(b)
    return FULL if first == second else PARTIAL if may_overlap(first, second) else None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _place(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype.itemsize


def may_overlap(a: tuple[Any, Any, int, int], b: tuple[Any, Any, int, int]) -> bool:
    """Whether two tensors (shape, strides, offset, bytes an element), on one storage, would overlap in part.

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
    """Whether the elements fill their range exactly, in some order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
