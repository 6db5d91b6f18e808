"""Operators whose results' sizes are decided by values, and that torch would run on zeros to answer."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, torchs_answer


@rule(
    "aten::_to_sparse",
    "aten::_to_sparse.sparse_dim",
    "aten::_to_sparse_csr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_bsc",
)
def _to_sparse(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """How many elements of a dense tensor are not zero, only its values know.

    Raises:
        DynamicOutputShapeException: always, for a dense input.
    """
    if args[0].layout is torch.strided and not mode.allow_fallback_kernels:
        raise DynamicOutputShapeException(func)
    return NotImplemented


@rule("aten::_unique")
def _unique(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """How many values are different, only the values know.

    Raises:
        DynamicOutputShapeException: always, unless real kernels may run.
    """
    if mode.allow_fallback_kernels:
        return NotImplemented
    raise DynamicOutputShapeException(func)


@rule("aten::_use_cudnn_ctc_loss.Tensor")
def _use_cudnn_ctc_loss(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Whether cuDNN computes the loss depends on the lengths' values where the rest does not rule it out (``LossCTC.cpp``).

    Raises:
        DataDependentOutputException: for float32 on a GPU with a blank of 0 and targets of int32 in one row.
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
    """Never in a build for NVIDIA's GPUs; with ROCm it is left to torch."""
    return NotImplemented if torch.version.hip else False


@rule("aten::unique_consecutive")
def _unique_consecutive(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """torch's answer for a dimension counted from the front: counted from the back, torch makes up a shape."""
    self, *rest = args
    options = {**dict(zip(("return_inverse", "return_counts", "dim"), rest, strict=False)), **kwargs}
    if options.get("dim") is not None and options["dim"] < 0:
        options["dim"] += max(self.dim(), 1)
    return torchs_answer(mode, func, (self,), options)
