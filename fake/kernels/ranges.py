"""``arange``, ``linspace``, ``logspace``, ``range`` with ``out=``: resized by number of elements, not by shape."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import FakeTensorMode, OpOverload
from fake.kernels.registry import rule

__all__ = ["range_out", "space_out"]


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
def space_out(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``steps`` elements; an ``out`` that has as many keeps its shape, whatever that is."""
    steps = args[2]
    torch._check(steps >= 0, lambda: "number of steps must be non-negative")
    return _with_elements(mode, kwargs["out"], steps)


@rule("aten::arange.out", "aten::arange.start_out", "aten::range.out", "aten::range.out_")
def range_out(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As many elements as the functional range has, in ``out``'s dtype."""
    out = kwargs["out"]
    make = torch.range if func.name().startswith("aten::range") else torch.arange
    with mode:
        wanted = make(*args, dtype=out.dtype, device=out.device)
    return _with_elements(mode, out, wanted.shape[0])


def _with_elements(mode: FakeTensorMode, out: torch.Tensor, count: Any) -> torch.Tensor:
    if out.numel() != count:
        with mode:
            out.resize_(count)
    return out
