"""Helpers that make the results of rules: fake tensors of a given shape, layout and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fake.seam import pytree
from fake.seam.dispatch import has_symbols, suggest_memory_format
from fake.seam.fake_tensor import FakeTensorMode
from fake.seam.symbolic_shapes import guard_or_false, hint

Size = Sequence[Any]


def contiguous_strides(shape: Size) -> tuple[Any, ...]:
    """Return row-major strides. As in eager, a dimension of size 0 counts as 1."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        if guard_or_false(size == 0):
            continue
        step = step * size
    return tuple(reversed(strides))


def column_major_strides(shape: Size) -> tuple[Any, ...]:
    """Return the strides of a batch of column-major matrices (row-major below two dimensions).

    >>> column_major_strides((2, 3, 4))
    (12, 1, 3)
    """
    rank = len(shape)
    return (
        permuted_strides(shape, (*range(rank - 2), rank - 1, rank - 2))
        if rank >= 2
        else contiguous_strides(shape)
    )


def permuted_strides(shape: Size, order: Sequence[int]) -> tuple[Any, ...]:
    """Return dense strides for ``shape``, with the dimensions of ``order`` from outermost to innermost.

    >>> permuted_strides((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    physical = contiguous_strides([shape[d] for d in order])
    strides: list[Any] = [0] * len(shape)
    for d, step in zip(order, physical, strict=True):
        strides[d] = step
    return tuple(strides)


def fresh(
    mode: FakeTensorMode, shape: Size, strides: Size | None, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new fake tensor with its own storage; row-major if ``strides`` is ``None``.

    Args:
        mode: the mode that the tensor belongs to.
        shape: its sizes, which may be symbolic.
        strides: its strides in elements.
        dtype: its dtype.
        device: its device.
    """
    with mode:
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as error messages show it, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def all_dense(args: Any, kwargs: Any) -> bool:
    """Return whether all tensor arguments are plain strided: not sparse, quantized, nested or oneDNN."""
    return all(
        leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    )


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous at the hints (``False`` without hints). Adds no guard."""
    expected = 1
    for size, step in zip(
        map(hint, reversed(tensor.shape)), map(hint, reversed(tensor.stride())), strict=True
    ):
        if size is None or step is None or (size != 1 and step != expected):
            return False
        expected *= max(size, 1)
    return True


def is_symbolic(args: Any, kwargs: Any) -> bool:
    """Return whether any number among the arguments, or any tensor's size, stride or offset, is symbolic."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if isinstance(leaf, torch.Tensor) and has_symbols(leaf):
            return True
    return False


def hinted(leaf: Any) -> Any:
    """Return a meta tensor (or number) with hints in place of symbolic sizes; ``None`` without a hint."""
    if isinstance(leaf, torch.Tensor):
        numbers = [hint(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())]
        if any(n is None for n in numbers):
            return None
        rank = leaf.dim()
        base = torch.empty(0, dtype=leaf.dtype, device="meta")
        return base.as_strided(numbers[:rank], numbers[rank : 2 * rank], numbers[-1])
    return hint(leaf)


def with_layout(mode: FakeTensorMode, result: Any, example: Any) -> Any:
    """Return ``result`` with the stride order of ``example`` if their strides differ at the hints.

    Args:
        mode: the mode that ``result`` belongs to.
        result: a fake tensor; anything else is returned as it is.
        example: a tensor with plain sizes and the same number of dimensions.
    """
    if not isinstance(result, torch.Tensor) or tuple(hint(s) for s in result.stride()) == example.stride():
        return result
    strides = example.stride()
    if tuple(result.shape) == tuple(example.shape) and not has_symbols(result):
        return fresh(mode, result.shape, strides, dtype=result.dtype, device=result.device)
    order = sorted(range(example.dim()), key=lambda d: (-strides[d], d))
    layout = permuted_strides(result.shape, order)
    return fresh(mode, result.shape, layout, dtype=result.dtype, device=result.device)


def in_format_of(mode: FakeTensorMode, tensor: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor``: channels-last if ``input`` suggests it, else row-major.

    Args:
        mode: the mode that ``tensor`` belongs to.
        tensor: the fake tensor whose shape, dtype and device the result has.
        input: the tensor whose memory format it has.
    """
    with mode:
        return torch.empty_like(tensor, memory_format=suggest_memory_format(input))


def row_major(mode: FakeTensorMode, tree: Any) -> Any:
    """Return ``tree`` (a tensor or a structure of tensors) with row-major strides."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or tuple(leaf.stride()) == contiguous_strides(leaf.shape):
            return leaf
        return fresh(mode, leaf.shape, None, dtype=leaf.dtype, device=leaf.device)

    return pytree.tree_map(convert, tree)
