"""Linear algebra that is not structured: column-major results, as LAPACK leaves them, and ``addbmm_``."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import FakeTensorMode, OpOverload
from fake.kernels.out_variants import resize_out
from fake.kernels.outputs import column_major_strides, fresh
from fake.kernels.registry import rule

__all__ = ["addbmm_", "geqrf"]


@rule("aten::geqrf")
def geqrf(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(a, tau)``: the factored matrices, column-major, and ``min(m, n)`` scalars for each."""
    (self,) = args
    torch._check(
        self.dim() >= 2, lambda: f"torch.geqrf: input must have at least 2 dimensions, got {self.dim()}"
    )
    *batch, rows, columns = self.shape
    return (
        fresh(mode, self.shape, column_major_strides(self.shape), dtype=self.dtype, device=self.device),
        fresh(mode, (*batch, torch.sym_min(rows, columns)), None, dtype=self.dtype, device=self.device),
    )


@rule("aten::addbmm_")
def addbmm_(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place, but a ``self`` that broadcasts to the product's shape is resized to it: eager calls ``addbmm_out``."""
    self = args[0]
    with mode:
        wanted = torch.ops.aten.addbmm.default(*args, **kwargs)
        resize_out(self, wanted.shape)
    return self
