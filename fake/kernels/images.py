"""Rules for image kernels: empty transposed convolutions, constant padding, and channels-last outputs."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import all_dense, fresh, in_format_of, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.kernels.structured import structured
from fake.seam.dispatch import check, conv_backend, suggest_memory_format
from fake.seam.fake_tensor import torch_result
from fake.seam.symbolic_shapes import hint


@rule("aten::convolution")
def _convolution(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the empty result that eager allows where padding removes all of a transposed convolution.

    torch's meta kernel refuses it. Both refuse negative sizes. torch's own CPU kernels, which eager uses for
    single images and for float64, also refuse an empty result.
    """
    bound = bind(func, args, kwargs)
    if not bound["transposed"] or not all_dense(args, kwargs):
        return NotImplemented
    source, weight = bound["input"], bound["weight"]
    rank = weight.dim() - 2
    if source.dim() != weight.dim() or rank < 1:
        return NotImplemented
    steps = [
        list(bound[name]) * (rank if len(bound[name]) == 1 else 1)
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
    is_empty = [size == 0 for size in sizes]
    if not any(is_empty):
        return NotImplemented
    if "Slow" in str(conv_backend(source, weight, bound)):
        raise RuntimeError(
            f"{func}: Given input size per channel: {list(source.shape[2:])}. Calculated output size per channel: {sizes}. "
            "Output size is too small"
        )
    if not all(is_empty):
        return NotImplemented
    shape = (source.shape[0], weight.shape[1] * bound["groups"], *sizes)
    return fresh(mode, shape, None, dtype=source.dtype, device=source.device)


@rule("aten::constant_pad_nd")
def _constant_pad_nd(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Pad with symbolic sizes, which eager's kernel (``PadNd.cpp``) cannot read.

    Returns a copy of what is left if nothing is added, else a new tensor in the input's memory format.
    torch's Python version differs where padding only removes elements.

    Raises:
        RuntimeError: a size would be negative (eager's error).
    """
    if not is_symbolic(args, kwargs) or not all_dense(args, kwargs):
        return NotImplemented
    self, pad = args[:2]
    check(
        len(pad) % 2 == 0 and len(pad) <= 2 * self.dim(),
        lambda: f"Length of pad should be even and at most {2 * self.dim()}. Pad length is {len(pad)}",
    )
    left = self
    shape = list(self.shape)
    with mode:
        for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            dim = self.dim() - 1 - place
            shape[dim] = shape[dim] + before + after
            wrong = (
                f"padding {[hint(before), hint(after)]} of dimension {dim} gives the size {hint(shape[dim])}"
            )
            check(shape[dim] >= 0, lambda wrong=wrong: wrong)  # type: ignore[misc]
            if before < 0:
                left = left.narrow(dim, -before, left.shape[dim] + before)
            if after < 0:
                left = left.narrow(dim, 0, left.shape[dim] + after)
        if not any(number > 0 for number in pad):
            return left.clone()
        return torch.empty(
            tuple(shape), dtype=self.dtype, device=self.device, memory_format=suggest_memory_format(self)
        )


_PADDED = ("reflection_pad2d", "reflection_pad3d", "replication_pad2d", "replication_pad3d")


@rule(
    *(f"aten::{name}" for name in ("max_unpool2d", "channel_shuffle", "native_channel_shuffle", *_PADDED)),
    *(f"aten::{name}_backward" for name in _PADDED),
)
def _keep_memory_format(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return torch's answer in the input's memory format on CPU; for gradients, the input is argument 1."""
    result, input = torch_result(mode, func, args, kwargs), args[func.name().endswith("_backward")]
    return in_format_of(mode, result, input) if input.device.type == "cpu" else result


@rule("aten::max_pool2d_with_indices")
def _max_pool(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Use the structured rule, except for empty inputs, which its decomposition cannot reshape."""
    if is_symbolic(args, kwargs) or args[0].numel() != 0:
        return structured(mode, func, args, kwargs)
    return torch_result(mode, func, args, kwargs)


@rule("aten::pixel_unshuffle")
def _pixel_unshuffle(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a copy of an empty image, as the CPU kernel does."""
    if is_symbolic(args, kwargs) or args[0].device.type != "cpu" or args[0].numel() != 0:
        return NotImplemented
    with mode:
        return args[0].clone()
