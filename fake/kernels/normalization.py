"""Normalizations on CPU, which allocate in a memory format of their own choice."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import FakeTensorMode, OpOverload, torchs_answer
from fake.kernels.outputs import in_format_of, is_symbolic, row_major
from fake.kernels.registry import rule

__all__ = ["batch_norm", "batch_norm_backward", "layer_norm"]


@rule(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
    "aten::_batch_norm_with_update",
)
def batch_norm(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output is row-major or channels-last, whichever suits the input; never just the input's strides."""
    input = args[0]
    output, *statistics = torchs_answer(mode, func, args, kwargs)
    if input.device.type == "cpu":
        format = None if is_symbolic(args, kwargs) else _contiguous_format(input, args[1:5])
        if format is None:
            output = in_format_of(mode, output, input)
        else:
            with mode:
                output = torch.empty_like(output, memory_format=format)
    return (output, *statistics)


def _contiguous_format(input: torch.Tensor, others: tuple[Any, ...]) -> torch.memory_format | None:
    """The format in which the input is contiguous, for the kernel that runs if all arguments are; else ``None``.

    Sizes of 1 leave strides open: such an input may be contiguous in a format that it does not suggest.
    """
    if not all(other.is_contiguous() for other in others if isinstance(other, torch.Tensor)):
        return None
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    candidates = (torch.contiguous_format, formats.get(input.dim(), torch.contiguous_format))
    return next((format for format in candidates if input.is_contiguous(memory_format=format)), None)


@rule("aten::native_batch_norm_backward", "aten::batch_norm_backward")
def batch_norm_backward(
    mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The input's gradient: the same choice."""
    input = args[1]
    grad_input, *gradients = torchs_answer(mode, func, args, kwargs)
    if grad_input is not None and input.device.type == "cpu":
        grad_input = in_format_of(mode, grad_input, input)
    return (grad_input, *gradients)


@rule("aten::native_layer_norm_backward")
def layer_norm(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All gradients are row-major: the kernel makes its inputs so first."""
    return row_major(mode, torchs_answer(mode, func, args, kwargs))
