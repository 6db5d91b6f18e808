"""Transposed convolutions whose result has no elements: eager computes them, torch's meta kernel refuses them."""

from __future__ import annotations

from typing import Any

from fake.kernels._torch import FakeTensorMode, OpOverload, conv_backend
from fake.kernels.outputs import all_dense, fresh
from fake.kernels.registry import Args, Kwargs, rule


@rule("aten::convolution")
def _convolution(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An empty result where the padding takes all that a transposed convolution makes; else torch's answer.

    A size that the padding makes negative is refused by both, and so is an empty result by torch's own kernels for the
    CPU, which eager takes for single images and for float64.
    """
    given = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs
    if not given["transposed"] or not all_dense(args, kwargs):
        return NotImplemented
    source, weight = given["input"], given["weight"]
    rank = weight.dim() - 2
    if source.dim() != weight.dim() or rank < 1:
        return NotImplemented
    steps = [
        list(given[name]) * (rank if len(given[name]) == 1 else 1)
        for name in ("stride", "padding", "dilation", "output_padding")
    ]
    sizes = [
        (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
        for size, kernel, stride, padding, dilation, extra in zip(
            source.shape[2:], weight.shape[2:], *steps, strict=True
        )
    ]
    if any(size < 0 for size in sizes):
        return NotImplemented
    nothing = [size == 0 for size in sizes]
    if not any(nothing):
        return NotImplemented
    if "Slow" in str(conv_backend(source, weight, given)):
        raise RuntimeError(
            f"{func}: Given input size per channel: {list(source.shape[2:])}. Calculated output size per channel: {sizes}. "
            "Output size is too small"
        )
    if not all(nothing):
        return NotImplemented
    shape = (source.shape[0], weight.shape[1] * given["groups"], *sizes)
    return fresh(mode, shape, None, dtype=source.dtype, device=source.device)
