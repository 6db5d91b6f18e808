"""Rules for losses.

Some are computed into a tensor like the input. Margin losses of a single sample are scalars, as in
``aten/src/ATen/native/LossMultiLabelMargin.cpp``."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import torch_result

_NO_REDUCTION = 0


@rule("aten::multilabel_margin_loss_forward")
def _multilabel_margin_loss_forward(
    mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """Return ``(loss, is_target)``. The loss is per sample only for a batch without reduction."""
    self, target, reduction = args
    if self.dim() > 2 or target.dim() > 2 or self.numel() == 0:
        return NotImplemented  # torch's kernel raises the error
    per_sample = reduction == _NO_REDUCTION and target.dim() == 2
    loss = fresh(mode, self.shape[:1] if per_sample else (), None, dtype=self.dtype, device=self.device)
    return loss, fresh(mode, target.shape, None, dtype=self.dtype, device=self.device)


@rule("aten::nll_loss_forward")
def _nll_loss_forward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Allow ``uint8`` targets, which torch cannot gather by, and a vector as one sample's target."""
    self, target, *rest = args
    of_one = self.dim() == 1 and target.dim() == 1 and target.shape[0] == 1
    if target.dtype is not torch.uint8 and not of_one:
        return NotImplemented
    with mode:
        return func(self, (target[0] if of_one else target).long(), *rest, **kwargs)


@rule("aten::huber_loss", "aten::soft_margin_loss", "aten::binary_cross_entropy")
def _computed_like_input(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Use the input's dtype and, without a reduction, its strides, whatever the target's dtype and layout."""
    result, self = torch_result(mode, func, args, kwargs), args[0]
    reduction = bind(func, args, kwargs)["reduction"]
    with mode:
        if reduction == _NO_REDUCTION and result.dim() == self.dim():
            return torch.empty_like(self)
        return result.to(self.dtype)
