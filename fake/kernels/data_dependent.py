"""Operators with data-dependent output sizes, which torch would answer by running them on zeros."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, torch_result


@rule(
    "aten::_to_sparse",
    "aten::_to_sparse.sparse_dim",
    "aten::_to_sparse_csr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_bsc",
)
def _to_sparse(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Refuse dense inputs: the number of nonzero elements depends on their values.

    Raises:
        DynamicOutputShapeException: the input is dense, and fallback kernels are not allowed.
    """
    if args[0].layout is torch.strided and not mode.allow_fallback_kernels:
        raise DynamicOutputShapeException(func)
    return NotImplemented


@rule("aten::_unique")
def _unique(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Refuse: the number of distinct values is data-dependent.

    Raises:
        DynamicOutputShapeException: always, unless fallback kernels are allowed.
    """
    if mode.allow_fallback_kernels:
        return NotImplemented
    raise DynamicOutputShapeException(func)


@rule("aten::_use_cudnn_ctc_loss.Tensor")
def _use_cudnn_ctc_loss(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``False`` unless the choice of cuDNN depends on the values of the lengths (``LossCTC.cpp``).

    Raises:
        DataDependentOutputException: for float32 on a GPU with a blank of 0 and one-dimensional int32
            targets.
    """
    log_probs, targets, *_, blank = args
    ruled_out = (
        log_probs.device.type != "cuda"
        or blank != 0
        or targets.dim() != 1
        or log_probs.dtype is not torch.float32
        or targets.dtype is not torch.int32
    )
    if ruled_out:
        return False
    raise DataDependentOutputException(func)


@rule("aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor")
def _use_miopen_ctc_loss(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``False`` in builds without ROCm; leave ROCm to torch."""
    return NotImplemented if torch.version.hip else False


@rule("aten::unique_consecutive")
def _unique_consecutive(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Pass torch a nonnegative dimension: for negative ones, torch invents a shape."""
    self, *rest = args
    options = {**dict(zip(("return_inverse", "return_counts", "dim"), rest, strict=False)), **kwargs}
    if options.get("dim") is not None and options["dim"] < 0:
        options["dim"] += max(self.dim(), 1)
    return torch_result(mode, func, (self,), options)
