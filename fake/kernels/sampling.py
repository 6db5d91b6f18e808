"""Rules for gathering operators whose Python meta kernels refuse more than eager does."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import fresh, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check


@rule("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def _grid_sampler(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return one sample per grid point, row-major. Kernels treat an unknown mode number as the last mode."""
    self, grid = args[:2]
    if is_symbolic(args, kwargs):
        return NotImplemented
    shape = (*self.shape[:2], *grid.shape[1:-1])
    return fresh(mode, shape, None, dtype=self.dtype, device=self.device)


@rule("aten::roll")
def _roll(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a copy if the tensor is empty: eager does not check the dimension then."""
    self, shifts, dims = (*args, *(kwargs.get(name, ()) for name in ("shifts", "dims")[len(args) - 1 :]))
    lengths = [len(v) if isinstance(v, list | tuple) else 1 for v in (shifts, dims)]
    if lengths != [1, 1] or is_symbolic((self,), {}) or self.numel() != 0:
        return NotImplemented
    with mode:
        return self.clone()


@rule("aten::repeat")
def _repeat(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Allow negative repeats of an empty dimension, as eager does."""
    self, repeats = args if len(args) == 2 else (args[0], kwargs["repeats"])
    if is_symbolic(args, kwargs) or len(repeats) < self.dim() or all(count >= 0 for count in repeats):
        return NotImplemented
    padded = [1] * (len(repeats) - self.dim()) + list(self.shape)
    shape = [size * count for size, count in zip(padded, repeats, strict=True)]
    check(
        all(size >= 0 for size in shape),
        lambda: (
            f"{func}: Trying to create tensor with negative dimension: {shape} (argument 'repeats' is {repeats})"
        ),
    )
    return fresh(mode, shape, None, dtype=self.dtype, device=self.device)


@rule("aten::where.self")
def _where(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Accept a ``uint8`` condition, as eager does (with a warning)."""
    condition, *values = args
    if condition.dtype is not torch.uint8 or len(values) != 2:
        return NotImplemented
    with mode:
        return func(condition.to(torch.bool), *values)
