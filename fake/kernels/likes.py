"""Operators that allocate like an input: they keep its exact strides if it is dense and does not overlap."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import all_dense, fresh, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam import pytree
from fake.seam.dispatch import is_dense
from fake.seam.fake_tensor import torch_result


@rule(
    *(f"aten::{name}_like" for name in ("empty", "ones", "zeros", "full", "rand", "randn", "randint")),
    *(f"aten::{name}_like.generator" for name in ("rand", "randn", "randint")),
    "aten::randint_like.low_dtype",
    "aten::randint_like.low_generator_dtype",
    "aten::flip",
    "aten::deg2rad",
    "aten::rad2deg",
    "aten::nan_to_num",
    "aten::_prelu_kernel",
    "aten::sort",
    "aten::fill.Scalar",
    "aten::fill.Tensor",
)
def _like_input(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Copy the input's strides, as eager does: torch's Python versions differ for sizes of 1."""
    input = args[0]
    dtype = kwargs.get("dtype") or input.dtype
    if func._schema.name == "aten::randn_like" and not dtype.is_floating_point and not dtype.is_complex:
        with mode:  # the input has no elements, or the call would have been refused
            return torch.empty_like(input, dtype=dtype, memory_format=kwargs.get("memory_format"))
    result = torch_result(mode, func, args, kwargs)
    preserves = kwargs.get("memory_format") in (None, torch.preserve_format)
    if not preserves or is_symbolic(args, kwargs) or not all_dense(args, kwargs) or not is_dense(input):
        return result
    return pytree.tree_map(lambda leaf: _like(mode, leaf, input), result)


def _like(mode: FakeTensorMode, leaf: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if leaf.layout is not torch.strided or leaf.stride() == input.stride():
        return leaf
    return fresh(mode, input.shape, input.stride(), dtype=leaf.dtype, device=leaf.device)
