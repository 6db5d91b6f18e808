"""Changing a given tensor's shape: ``resize_``, and the same thing as ``out=`` arguments need it."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import contiguous_strides, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule


def restride(tensor: torch.Tensor, shape: Any, strides: Any = None) -> torch.Tensor:
    """Give ``tensor`` this shape and these strides (``None``: row-major) in place; its storage grows if it must.

    To be called under the mode, so that the engine sees the metadata change. ``set_`` on the tensor's own storage is
    the one operator that does this for all combinations of concrete and symbolic sizes, before and after.

    Args:
        tensor: a fake tensor.
        shape: its new sizes.
        strides: its new strides in elements.
    """
    strides = contiguous_strides(shape) if strides is None else strides
    return tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(strides))


@rule("aten::resize_")
def _resize_(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """``resize_`` where symbolic sizes are involved: torch's cannot go from symbolic to concrete ones."""
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
    """``resize_as_`` to a tensor of symbolic sizes, or of one that has them."""
    self, template = args
    memory_format = kwargs.get("memory_format")
    if not is_symbolic(args, kwargs) or memory_format not in (None, torch.contiguous_format):
        return NotImplemented
    return _resize_(mode, func, (self, tuple(template.shape)), {})
