"""``out=`` of ``arange``, ``linspace``, ``logspace`` and ``range``: resized by element count, not shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check


@rule(
    "aten::linspace.out",
    "aten::linspace.Tensor_Tensor_out",
    "aten::linspace.Tensor_Scalar_out",
    "aten::linspace.Scalar_Tensor_out",
    "aten::logspace.out",
    "aten::logspace.Tensor_Tensor_out",
    "aten::logspace.Tensor_Scalar_out",
    "aten::logspace.Scalar_Tensor_out",
)
def _space_out(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``out`` with ``steps`` elements; it keeps its shape if it already has that many."""
    steps = args[2]
    check(steps >= 0, lambda: "number of steps must be non-negative")
    return _with_elements(mode, kwargs["out"], steps)


@rule("aten::arange.out", "aten::arange.start_out", "aten::range.out", "aten::range.out_")
def _range_out(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``out`` with as many elements as the functional range in ``out``'s dtype."""
    out = kwargs["out"]
    make = torch.range if func.name().startswith("aten::range") else torch.arange
    with mode:
        wanted = make(*args, dtype=out.dtype, device=out.device)
    return _with_elements(mode, out, wanted.shape[0])


@rule("aten::arange.start_step")
def _arange(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle integer dtypes and fractional steps: eager counts steps before rounding, torch after."""
    start, end, step = (*args, 1)[:3]
    dtype = kwargs.get("dtype")
    if (
        dtype in (None, torch.int64)
        or dtype.is_floating_point
        or not any(type(n) is float for n in (start, end, step))
    ):
        return NotImplemented
    if any(type(n) not in (int, float) for n in (start, end, step)) or step == 0 or (end - start) / step < 0:
        return NotImplemented
    count = math.ceil((end - start) / step)
    return fresh(mode, (count,), None, dtype=dtype, device=kwargs.get("device") or torch.get_default_device())


def _with_elements(mode: FakeTensorMode, out: torch.Tensor, count: Any) -> torch.Tensor:
    if out.numel() != count:
        with mode:
            out.resize_(count)
    return out
