"""Rules for attention on GPU."""

from __future__ import annotations

from typing import Any

from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import torch_result


@rule("aten::_efficient_attention_backward")
def _efficient_attention_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return row-major gradients of query, key and value, unless they share one storage."""
    result = torch_result(mode, func, args, kwargs)
    if kwargs.get("shared_storage_dqdkdv"):
        return result
    own, (bias,) = result[:3], result[3:]
    return (*(fresh(mode, g.shape, None, dtype=g.dtype, device=g.device) for g in own), bias)
