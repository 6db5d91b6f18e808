"""Padding with a constant where sizes are symbolic.

Eager's kernel (``constant_pad_nd`` in ``aten/src/ATen/native/PadNd.cpp``) cannot read symbolic sizes, and the Python
version of it that torch uses under its Python dispatcher takes another path where padding only removes elements.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import FakeTensorMode, OpOverload, hint, suggest_memory_format
from fake.kernels.outputs import all_dense, is_symbolic
from fake.kernels.registry import Args, Kwargs, rule
from fake.seam.dispatch import check


@rule("aten::constant_pad_nd")
def _constant_pad_nd(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A copy of what is left if nothing is added, else a new tensor in the input's memory format.

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
