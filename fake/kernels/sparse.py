"""Rules for matmuls with sparse matrices, for which torch has no meta kernels.

A fake sparse tensor does not know how many elements it stores. Only its shape, dtype and layout are needed.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import all_dense, fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.kernels.structured import structured
from fake.seam.dispatch import check
from fake.seam.fake_tensor import DynamicOutputShapeException, in_kernel_invocation_manager

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc)
_RETURNS_INDICES = ("amax", "amin")
_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@rule("aten::sparse_sampled_addmm", sparse=True)
def _sampled_addmm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a tensor with the sparsity of ``self`` for a dense matmul that is sampled at its indices."""
    self, mat1, mat2 = args
    check(
        mat1.dim() >= 2 and mat2.dim() >= 2,
        lambda: f"{func.name()}: mat1 and mat2 must be matrices, not of shape {mat1.shape} and {mat2.shape}",
    )
    check(
        self.dtype == mat1.dtype == mat2.dtype,
        lambda: (
            f"{func.name()}: self, mat1 and mat2 must have one dtype, not {self.dtype}, {mat1.dtype}, {mat2.dtype}"
        ),
    )
    check(
        self.shape[:-2] == mat1.shape[:-2] == mat2.shape[:-2],
        lambda: (
            f"{func.name()}: expected one batch, but got {self.shape[:-2]}, {mat1.shape[:-2]}, {mat2.shape[:-2]}"
        ),
    )
    check(
        not isinstance(kwargs.get("beta"), complex) or self.is_complex(),
        lambda: f"{func.name()}: beta is complex and can't be cast to {self.dtype}",
    )
    check(
        mat1.shape[-1] == mat2.shape[-2],
        lambda: f"{func.name()}: mat1 and mat2 shapes cannot be multiplied ({mat1.shape} and {mat2.shape})",
    )
    check(
        (mat1.shape[-2], mat2.shape[-1]) == tuple(self.shape[-2:]),
        lambda: (
            f"{func.name()}: self.shape {self.shape} is not the shape of the product of {mat1.shape}, {mat2.shape}"
        ),
    )
    with mode:
        return self.clone()


@rule("aten::mm", sparse=True)
def mm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a row-major result for a sparse and a dense matrix; use the structured rule for dense ones.

    Args:
        mode: see ``Rule``.
        func: ``aten::mm``.
        args: two matrices.
        kwargs: empty.
    """
    if all_dense(args, kwargs):
        return structured(mode, func, args, kwargs)
    self, mat2 = args
    layouts = {self.layout, mat2.layout}
    if torch.strided not in layouts or not layouts & {*_COMPRESSED, torch.sparse_coo}:
        return NotImplemented
    return _dense_matmul(mode, func, self, mat2)


@rule("aten::_sparse_addmm", sparse=True)
def _addmm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.sparse.mm`` and ``addmm`` of a sparse and a dense matrix like a dense matmul."""
    self, mat1, mat2 = args[:3]
    if mat2.layout is not torch.strided or self.layout is not torch.strided:
        return NotImplemented
    return _dense_matmul(mode, func, mat1, mat2)


def _dense_matmul(mode: FakeTensorMode, func: OpOverload, self: torch.Tensor, mat2: torch.Tensor) -> Any:
    check(
        self.shape[1] == mat2.shape[0],
        lambda: f"{func.name()}: mat1 and mat2 shapes cannot be multiplied ({self.shape} and {mat2.shape})",
    )
    check(
        self.dtype == mat2.dtype or torch.sparse_coo not in (self.layout, mat2.layout),
        lambda: f"{func.name()}: expected scalar type {self.dtype} but found {mat2.dtype}",
    )
    shape = (self.shape[0], mat2.shape[1])
    strides = (1, shape[0]) if mat2.layout is torch.sparse_coo else None  # computed as the transposed matmul
    return fresh(mode, shape, strides, dtype=self.dtype, device=self.device)


@rule("aten::_sparse_mm_reduce_impl", sparse=True)
def _mm_reduce(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``(result, indices)``; indices of extremes are kept only for a backward pass."""
    self, other, reduce = args
    check(
        reduce in _REDUCTIONS,
        lambda: f"{func.name()}: reduce argument must be one of {', '.join(_REDUCTIONS)}, got {reduce}",
    )
    check(
        self.dtype == other.dtype,
        lambda: f"{func.name()}: expected argument 'other' to have dtype {self.dtype}, but got {other.dtype}",
    )
    check(
        other.dim() == 2 and other.shape[0] == self.shape[1],
        lambda: (
            f"{func.name()}: expected 'other' to be a matrix of {self.shape[1]} rows, but got {other.shape}"
        ),
    )
    shape = (self.shape[0], other.shape[1])
    keeps = reduce in _RETURNS_INDICES and (self.requires_grad or other.requires_grad)
    return (
        fresh(mode, shape, None, dtype=other.dtype, device=other.device),
        fresh(mode, shape if keeps else (0,), None, dtype=torch.int64, device=other.device),
    )


@rule("aten::_sparse_mm_reduce_impl_backward", sparse=True)
def _mm_reduce_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the requested gradients: one with ``self``'s sparsity, one with the dense factor's shape."""
    self, _, weight, _, _, output_mask = args
    with mode:
        grad_self = self.clone() if output_mask[0] else None
    if not output_mask[1]:
        return grad_self, None
    return grad_self, fresh(mode, weight.shape, None, dtype=weight.dtype, device=weight.device)


@rule(
    "aten::sparse_compressed_tensor.comp_plain_value",
    "aten::sparse_compressed_tensor.comp_plain_value_size",
    sparse=True,
)
def _compressed(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Build a compressed sparse tensor. Without ``size``, its shape would depend on the indices."""
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    if "size" not in named:
        raise DynamicOutputShapeException(func)
    device = torch.device(named.get("device") or named["values"].device)
    with in_kernel_invocation_manager(mode):
        made = func(*args, **{**kwargs, "device": "meta"})
    return mode.fake_tensor_converter.from_meta_and_device(mode, made, device)
