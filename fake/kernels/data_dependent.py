"""Operators whose results' sizes are decided by values, and that torch would run on zeros to answer."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import DynamicOutputShapeException, FakeTensorMode, OpOverload, torchs_answer
from fake.kernels.registry import Args, Kwargs, rule


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


@rule("aten::unique_consecutive")
def _unique_consecutive(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """torch's answer for a dimension counted from the front: counted from the back, torch makes up a shape."""
    self, *rest = args
    options = {**dict(zip(("return_inverse", "return_counts", "dim"), rest, strict=False)), **kwargs}
    if options.get("dim") is not None and options["dim"] < 0:
        options["dim"] += max(self.dim(), 1)
    return torchs_answer(mode, func, (self,), options)
