"""Rules for unstructured linear algebra: column-major results, as LAPACK leaves them, and batched matmuls."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.out_variants import resize_out
from fake.kernels.outputs import column_major_strides, fresh, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.kernels.structured import structured
from fake.seam.dispatch import check


@rule("aten::geqrf")
def _geqrf(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``(a, tau)``: the factored matrices, column-major, and ``min(m, n)`` scalars per matrix."""
    (self,) = args
    check(self.dim() >= 2, lambda: f"torch.geqrf: input must have at least 2 dimensions, got {self.dim()}")
    *batch, rows, columns = self.shape
    return (
        fresh(mode, self.shape, column_major_strides(self.shape), dtype=self.dtype, device=self.device),
        fresh(mode, (*batch, torch.sym_min(rows, columns)), None, dtype=self.dtype, device=self.device),
    )


@rule("aten::_linalg_svd")
def _svd(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Use the structured rule on CPU only: torch's Python kernel knows the strides of cuSOLVER."""
    return structured(mode, func, args, kwargs) if args[0].device.type == "cpu" else NotImplemented


@rule("aten::addbmm_")
def _addbmm_(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Resize a ``self`` that broadcasts to the product's shape, because eager calls ``addbmm_out``."""
    self = args[0]
    with mode:
        wanted = torch.ops.aten.addbmm.default(*args, **kwargs)
        resize_out(self, wanted.shape)
    return self


@rule("aten::bmm", "aten::baddbmm")
def _batches(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Use the last factor's dtype if there is nothing to multiply: the CPU does not compare dtypes then."""
    *others, first, second = args[: 2 if func.name() == "aten::bmm" else 3]
    dtypes = {other.dtype for other in (*others, first)}
    plain = is_symbolic(args, kwargs) or second.dtype in dtypes or second.device.type != "cpu"
    if plain or len(dtypes) > 1 or first.numel() * second.numel() != 0:
        return structured(mode, func, args, kwargs)
    with mode:
        return func(*(other.to(second.dtype) for other in (*others, first)), second, **kwargs)


@rule("aten::linalg_vector_norm")
def _vector_norm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return an empty norm if the reduced dimensions have elements; torch's version refuses some orders."""
    self, order, dims = (*args, 2, None)[:3] if len(args) < 3 else args[:3]
    dims = kwargs.get("dim", dims)
    dims = (dims,) if isinstance(dims, int) else dims
    if is_symbolic(args, kwargs) or self.numel() != 0 or not dims or order == 2:
        return structured(mode, func, args, kwargs)
    if any(not -self.dim() <= dim < self.dim() or self.shape[dim] == 0 for dim in dims):
        return structured(mode, func, args, kwargs)
    with mode:
        return func(self, 2, *args[2:], **{name: value for name, value in kwargs.items() if name != "ord"})
