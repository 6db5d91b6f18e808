"""The operators decomposed before passes see them: torch's table for Inductor, plus fixes of our own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fake.seam.symbolic_shapes import statically_known_true
from fxpasses._torch import select_decomp_table

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table, by operator, in AOTAutograd's format."""
    return {**select_decomp_table(), **_OURS}


def _avg_pool_backward(dims: int, backward: Any) -> Callable[..., Any]:
    """Decompose the gradient of an average pooling into a form that Inductor computes correctly.

    For windows that extend beyond the padding (``ceil_mode``), Inductor's lowering divides by the kernel
    size, although the mean is over fewer elements, and silently returns wrong gradients. It also does not
    accept lists of one number for all dimensions. Seen in torch 2.13 to 2.15.
    """

    def decomposed(
        grad: torch.Tensor,
        self: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        include_padding: bool,
        divisor: int | None,
    ) -> Any:
        """The input's gradient, or ``NotImplemented`` to keep the call. Args: as ``avg_pool*d_backward``."""
        given = [kernel_size, stride or kernel_size, padding]
        kernel, step, pad = (list(one) * dims if len(one) == 1 else list(one) for one in given)
        ends = [size + p for size, p in zip(self.shape[-dims:], pad, strict=True)]
        windows = list(zip(grad.shape[-dims:], kernel, step, pad, ends, strict=True))
        inside = all(statically_known_true((n - 1) * s - p + k <= end) for n, k, s, p, end in windows)
        if ceil_mode and include_padding and divisor is None and not inside:
            grad, divisor = grad / _sizes(windows, grad.device), 1
            if dims == 3:
                return _in_two_steps(grad, self, kernel, step, pad)
        elif [kernel, step, pad] == [list(kernel_size), list(stride), list(padding)]:
            return NotImplemented  # nothing to fix
        return backward(grad, self, kernel, step, pad, ceil_mode, include_padding, divisor)

    return decomposed


def _in_two_steps(
    grad: torch.Tensor, self: torch.Tensor, kernel: list[int], step: list[int], pad: list[int]
) -> torch.Tensor:
    """The gradient of sums over 3-D windows, in two steps: over two dimensions, then over one.

    In one step, Inductor generates code for each of 27 windows, with everything computed for it.

    Args:
        grad: the gradient of the sums.
        self: the tensor that was summed.
        kernel: the window sizes.
        step: the strides.
        pad: the padding.
    """
    backward = aten.avg_pool2d_backward.default
    depth, height, width = self.shape[-3:]
    slices = grad.reshape(-1, *grad.shape[-2:])
    plane = self.new_zeros(()).expand(
        slices.shape[0], height, width
    )  # only a placeholder: its sizes are read, not its data
    slices = backward(slices, plane, kernel[1:], step[1:], pad[1:], True, True, 1)
    columns = slices.reshape(-1, grad.shape[-3], height * width)
    whole = self.new_zeros(()).expand(columns.shape[0], depth, height * width)
    return backward(columns, whole, [kernel[0], 1], [step[0], 1], [pad[0], 0], True, True, 1).view(self.shape)


def _sizes(windows: Sequence[tuple[Any, ...]], device: torch.device) -> torch.Tensor:
    """The number of elements in each window, padding included.

    Args:
        windows: per dimension: number of windows, size, stride, padding, and where the padded input ends.
        device: the device of the result.
    """
    sizes = []
    for d, (n, k, s, p, end) in enumerate(windows):
        start = torch.arange(n, device=device) * s - p
        taken = (start + k).clamp(max=end) - start
        sizes.append(taken.view(-1, *[1] * (len(windows) - 1 - d)))
    return math.prod(sizes[1:], start=sizes[0])


_OURS = {
    aten.avg_pool2d_backward.default: _avg_pool_backward(2, aten.avg_pool2d_backward.default),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3, aten.avg_pool3d_backward.default),
}
