"""Rules for ``resize_`` and ``resize_as_``, and the resize that ``out=`` arguments need."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import contiguous_strides, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule


def restride(tensor: torch.Tensor, shape: Any, strides: Any = None) -> torch.Tensor:
    """Give ``tensor`` this shape and these strides (``None``: row-major) in place. Storage grows if needed.

    Call this under the mode, so that the engine sees the metadata change. ``set_`` on the tensor's own
    storage is the only operator that does this for all combinations of concrete and symbolic sizes, before
    and after.

    Args:
        tensor: a fake tensor.
        shape: its new sizes.
        strides: its new strides in elements.
    """
    strides = contiguous_strides(shape) if strides is None else strides
    return tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(strides))


@rule("aten::resize_")
def _resize_(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle symbolic sizes: torch's ``resize_`` cannot go from symbolic to concrete sizes."""
    self, shape = args
    memory_format = kwargs.get("memory_format")
    if not is_symbolic(args, kwargs) or memory_format not in (None, torch.contiguous_format):
        return NotImplemented
    if len(self.shape) == len(shape) and all(a == b for a, b in zip(self.shape, shape, strict=True)):
        return self
    with mode:
        return restride(self, shape)


@rule("aten::resize_as_")
def _resize_as_(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``resize_as_`` where either tensor has symbolic sizes."""
    self, template = args
    memory_format = kwargs.get("memory_format")
    if not is_symbolic(args, kwargs) or memory_format not in (None, torch.contiguous_format):
        return NotImplemented
    return _resize_(mode, func, (self, tuple(template.shape)), {})
