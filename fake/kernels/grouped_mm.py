"""Rule for ``aten::_grouped_mm`` (mixture-of-experts matmuls): torch's meta kernel takes bfloat16 only."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Bytes: strides of input rows must be a multiple of this, and rows of the result are padded to it."""


@rule("aten::_grouped_mm")
def _grouped_mm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Check and allocate as ``at::native::_grouped_mm_cpu`` and ``_cuda`` do (``GroupedMMUtils.h``).

    Sizes: (rows, k) x (groups, k, n) to (rows, n); (groups, m, k) x (k, columns) to (m, columns);
    (m, k) x (k, n) to (groups, m, n), the groups being parts of k; (groups, m, k) x (groups, k, n) to (groups, m, n).
    """
    bound = bind(func, args, kwargs)
    left, right, offsets = bound["self"], bound["mat2"], bound["offs"]
    for name, matrix in (("mat_a", left), ("mat_b", right)):
        check(
            matrix.dtype in _DTYPES,
            lambda name=name, matrix=matrix: (
                f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {matrix.dtype}"
            ),
        )
        check(
            matrix.dim() in (2, 3),
            lambda name=name, matrix=matrix: f"{name} has to be 2 or 3d, got {matrix.dim()} dimensions",
        )
    together = left.dim() == 2 and right.dim() == 2
    batched = left.dim() == 3 and right.dim() == 3
    if not together:
        check(left.size(-1) == right.size(-2), lambda: "contraction dimension of mat_a and mat_b must match")
    check(
        (offsets is not None) != batched,
        lambda: "Have to provide offsets if there is a 2d matrix, or no offset",
    )
    for matrix in (left, right):
        _check_strides(matrix)
    if together:
        sizes = [offsets.size(0), left.size(0), right.size(1)]
    elif left.dim() == 2:
        check(offsets.size(0) == right.size(0), lambda: "matrix batch sizes have to match")
        sizes = [left.size(0), right.size(-1)]
    elif right.dim() == 2:
        check(offsets.size(0) == left.size(0), lambda: "matrix batch sizes have to match")
        sizes = [left.size(1), right.size(1)]
    else:
        check(left.size(0) == right.size(0), lambda: "batched dimension has to match")
        sizes = [left.size(0), left.size(1), right.size(-1)]
    dtype = bound["out_dtype"] or left.dtype
    alignment = _ALIGNMENT // dtype.itemsize
    row = (sizes[-1] + alignment - 1) // alignment * alignment
    strides = [sizes[1] * row, row, 1][-len(sizes) :]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=left.device)


def _check_strides(matrix: torch.Tensor) -> None:
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride()[-2:]
    alignment = _ALIGNMENT // matrix.element_size()
    if row_step == 1 and column_step >= max(1, rows):
        step = column_step
    else:
        check(
            column_step == 1 and row_step >= max(1, columns),
            lambda: (
                f"Invalid strides/sizes, got {tuple(matrix.stride())} for strides and {tuple(matrix.shape)} for sizes"
            ),
        )
        step = row_step
    check(step % alignment == 0, lambda: "strides should be multiple of 16 bytes")
