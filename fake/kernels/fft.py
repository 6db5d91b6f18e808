"""Fast Fourier transforms on CPU, with the strides that MKL's kernel produces.

``_exec_fft`` in ``aten/src/ATen/native/mkl/SpectralOps.cpp`` transforms a row-major buffer with the batch
dimensions first and the transformed dimensions last, and returns a permuted view of it. So the strides of the
result depend on how it sorts those dimensions, including the order in which ``std::partition`` leaves them
(it swaps and is not stable). torch's meta kernel gets that order wrong where strides are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fake.kernels.outputs import contiguous_strides, fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.symbolic_shapes import guard_or_false


def partition(items: list[int], first_kind: Callable[[int], bool]) -> list[int]:
    """Emulate ``std::partition`` for random-access iterators: swap items of the first kind to the front.

    >>> partition([0, 1, 2, 3], lambda d: d != 0)
    [3, 1, 2, 0]
    """
    items = list(items)
    first, last = 0, len(items)
    while True:
        while first != last and first_kind(items[first]):
            first += 1
        if first == last:
            return items
        last -= 1
        while first != last and not first_kind(items[last]):
            last -= 1
        if first == last:
            return items
        items[first], items[last] = items[last], items[first]
        first += 1


def _by_falling_stride(dims: Sequence[int], strides: Sequence[Any]) -> list[int]:
    """Sort by descending stride. Stable, as ``std::sort`` is below 17 items."""

    def compare(a: int, b: int) -> int:
        if guard_or_false(strides[a] > strides[b]):
            return -1
        return 1 if guard_or_false(strides[a] < strides[b]) else 0

    return sorted(dims, key=functools.cmp_to_key(compare))


def fft_strides(strides: Sequence[Any], dims: Sequence[int], out_sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a transform over ``dims`` (in this order) of a tensor with ``strides``.

    Args:
        strides: the input's strides in elements.
        dims: the transformed dimensions, not negative.
        out_sizes: the output's shape.

    >>> fft_strides((12, 4, 1), [1], (2, 3, 4))
    (12, 1, 3)
    """
    rank = len(strides)
    order = partition(list(range(rank)), lambda d: d not in dims)
    batch = _by_falling_stride(order[: rank - len(dims)], strides)
    order = [*batch, *dims]
    physical = contiguous_strides([out_sizes[d] for d in order])
    result: list[Any] = [0] * rank
    for d, step in zip(order, physical, strict=True):
        result[d] = step
    return tuple(result)


def _is_mkl(self: torch.Tensor) -> bool:
    return self.device.type == "cpu" and torch.backends.mkl.is_available()


@rule("aten::_fft_c2c")
def _c2c(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Complex to complex: all dimensions are sorted by descending stride."""
    self, dim = args[0], args[1]
    if not _is_mkl(self) or not dim or not self.is_complex():
        return NotImplemented
    strides = _c2c_strides(self.shape, self.stride(), dim)
    return fresh(mode, self.shape, strides, dtype=self.dtype, device=self.device)


def _c2c_strides(shape: Sequence[Any], strides: Sequence[Any], dim: Sequence[int]) -> tuple[Any, ...]:
    dims = _by_falling_stride([d % len(shape) for d in dim], strides)
    return fft_strides(strides, dims, shape)


@rule("aten::_fft_r2c")
def _r2c(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Real to complex: the last transformed dimension, halved if one-sided, stays last."""
    self, dim, _, onesided = args
    if not _is_mkl(self) or not self.is_floating_point():
        return NotImplemented
    dims = [d % self.dim() for d in dim]
    sizes = list(self.shape)
    if onesided:
        sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    dims = [*_by_falling_stride(dims[:-1], self.stride()), dims[-1]]
    strides = fft_strides(self.stride(), dims, sizes)
    return fresh(mode, sizes, strides, dtype=self.dtype.to_complex(), device=self.device)


@rule("aten::_fft_c2r")
def _c2r(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Complex to real: a complex transform of all dimensions but the last, then a real one of the last."""
    self, dim, _, last_dim_size = args
    if not _is_mkl(self) or not self.is_complex():
        return NotImplemented
    dims = [d % self.dim() for d in dim]
    strides = tuple(self.stride())
    if len(dims) > 1:
        strides = _c2c_strides(self.shape, strides, dims[:-1])
    sizes = list(self.shape)
    sizes[dims[-1]] = last_dim_size
    strides = fft_strides(strides, dims[-1:], sizes)
    return fresh(mode, sizes, strides, dtype=self.dtype.to_real(), device=self.device)
