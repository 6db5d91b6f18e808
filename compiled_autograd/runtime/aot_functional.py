"""What a captured graph calls at run time around an inlined backward graph of AOTAutograd.

AOTAutograd calls its backward graph with the values that the forward saved and one gradient ("tangent") per
output, each in the layout that it was traced for; a tensor subclass is taken apart before, and put together
after.
"""

from collections.abc import Sequence
from typing import Any

import torch

from compiled_autograd import _torch_aot
from compiled_autograd.runtime import functional
from compiled_autograd.runtime.running import running

__all__ = ["epilogue", "prologue", "stashed_tensors", "tangent", "zeros"]

Grad = torch.Tensor | None


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """The gradient of an output that the backward pass does not reach."""
    return torch.zeros(tuple(sizes), dtype=dtype, device=device)


def tangent(
    grad: Grad,
    missing: tuple[Sequence[int], torch.dtype, str] | None,
    memory_format: torch.memory_format | None,
    size: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Grad:
    """A gradient as the backward graph was traced for it.

    Args:
        grad: the gradient of one output; None where it is missing.
        missing: sizes, dtype and device of the zeros that stand for it then; None for one that is never missing.
        memory_format: its layout, for a graph with symbolic sizes.
        size: its sizes, for any other.
        stride: its strides, for any other.

    Returns:
        ``grad`` itself where it fits, and a copy where it does not.
    """
    if grad is None:
        if missing is None:
            return None
        grad = zeros(*missing)
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return _torch_aot.coerce_tangent(grad, memory_format, size, stride)
    if memory_format is not None:
        return grad.contiguous(memory_format=memory_format)
    if grad.shape == size and grad.stride() == stride:
        return grad
    assert size is not None  # sizes and strides are given where there is no memory format
    assert stride is not None
    return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def stashed_tensors(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Saved tensors that a compiled function keeps on its context, out of sight of the engine."""
    return tuple(ctx._tensors_no_vc_check)


def prologue(ctx: Any, saved: Sequence[Any], grads: Sequence[Any], *, node: int) -> list[Any]:
    """All arguments of the backward graph of a function on tensor subclasses, taken apart."""
    running.enter(node)
    gradients = list(functional.materialize(ctx, grads))
    return _torch_aot.prologue_arguments(
        ctx._forward_cls, tuple(saved), ctx.symints, getattr(ctx, "opaque_objects", ()), gradients
    )


def epilogue(ctx: Any, results: Sequence[Any], *, node: int) -> tuple[Grad, ...]:
    """What such a graph computed, put together: one gradient per input of the function."""
    running.enter(node)
    return tuple(ctx._forward_cls._bw_epilogue_fn(list(results)))
