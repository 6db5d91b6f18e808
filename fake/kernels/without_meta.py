"""Rules for CPU operators that have no meta kernel and that torch's ``op_db`` does not test.

They are fake quantization, fused training operators, random distributions and their derivatives, CTC loss,
and the operators behind single-layer convolutions. torch's own mode runs their real kernels on zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check


def _like(mode: FakeTensorMode, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(tensor, **options)


@rule(
    "aten::_fake_quantize_learnable_per_channel_affine",
    "aten::_fake_quantize_learnable_per_tensor_affine",
    "aten::_add_relu.Scalar",
    "aten::_masked_softmax",
    "aten::glu_jvp",
)
def _like_first(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a tensor like the first argument, in its stride order."""
    return _like(mode, args[0])


_ROW_MAJOR_LIKE = {
    **dict.fromkeys(
        (
            "aten::_dirichlet_grad",
            "aten::_logcumsumexp",
            "aten::_masked_softmax_backward",
            "aten::_sample_dirichlet",
            "aten::_standard_gamma_grad",
            "aten::binomial",
            "aten::glu_backward_jvp",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "aten::_ctc_loss_backward",
            "aten::_ctc_loss_backward.Tensor",
            "aten::multilabel_margin_loss_backward",
            "aten::multi_margin_loss_backward",
            "aten::fractional_max_pool3d_backward",
            "aten::huber_loss_backward",
            "aten::mse_loss_backward",
            "aten::smooth_l1_loss_backward",
        ),
        1,
    ),
}
"""Operators whose result has the shape of an argument, with that argument's position. (``Loss.cpp`` allocates
gradients as ``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``.)"""


@rule(*_ROW_MAJOR_LIKE)
def _row_major_like(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a row-major tensor like an argument."""
    return _like(mode, args[_ROW_MAJOR_LIKE[func.name()]], memory_format=torch.contiguous_format)


@rule(
    "aten::fake_quantize_per_channel_affine_cachemask",
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
def _like_with_mask(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the quantized values and the mask of those that were in range."""
    return _like(mode, args[0]), _like(mode, args[0], dtype=torch.bool)


@rule(
    "aten::_fake_quantize_learnable_per_tensor_affine_backward",
    "aten::_fake_quantize_learnable_per_channel_affine_backward",
)
def _gradients_of_scales(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return gradients of the input, scale and zero point, one per tensor or per channel."""
    grad, shape = _like(mode, args[1]), (1,) if "per_tensor" in func.name() else args[2].shape
    return grad, *(fresh(mode, shape, None, dtype=grad.dtype, device=grad.device) for _ in range(2))


@rule("aten::_aminmax", "aten::batch_norm_update_stats")
def _two_per_channel(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the minimum and maximum, or the mean and variance of each channel."""
    self = args[0]
    shape = () if func.name() == "aten::_aminmax" else (self.shape[1],)
    return tuple(fresh(mode, shape, None, dtype=self.dtype, device=self.device) for _ in range(2))


@rule("aten::_compute_linear_combination")
def _linear_combination(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return sums along the first dimension, one per row of coefficients."""
    self, coefficients = args
    return fresh(mode, (coefficients.shape[0], *self.shape[1:]), None, dtype=self.dtype, device=self.device)


@rule("aten::_ctc_loss")
def _ctc_loss(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a loss per sequence and the forward table, as wide as the longest target with blanks."""
    log_probs, targets, input_lengths, target_lengths = args[:4]
    check(log_probs.numel() > 0, lambda: f"{func.name()}: log_probs tensor must not be empty")
    steps, batch = log_probs.shape[:2]
    longest = max(target_lengths, default=0)
    check(
        len(input_lengths) == batch and len(target_lengths) == batch,
        lambda: (
            f"{func.name()}: input_lengths and target_lengths must have a number for each of {batch} sequences, "
            f"not {len(input_lengths)} and {len(target_lengths)}"
        ),
    )
    check(
        all(0 <= length <= steps for length in input_lengths) and all(n >= 0 for n in target_lengths),
        lambda: f"{func.name()}: input_lengths must be between 0 and {steps}, target_lengths not negative",
    )
    enough = targets.shape[0] == (sum(target_lengths) if targets.dim() == 1 else batch)
    check(
        enough and (targets.dim() == 1 or targets.shape[1] >= longest),
        lambda: (
            f"{func.name()}: targets of shape {list(targets.shape)} do not fit target_lengths {target_lengths}"
        ),
    )
    options = {"dtype": log_probs.dtype, "device": log_probs.device}
    return (
        fresh(mode, (batch,), None, **options),
        fresh(mode, (batch, steps, 2 * longest + 1), None, **options),
    )


@rule(
    "aten::_slow_conv2d_forward",
    "aten::slow_conv3d_forward",
    "aten::slow_conv_dilated2d",
    "aten::slow_conv_dilated3d",
    "aten::slow_conv_transpose3d",
)
def _convolution(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of ``convolution`` for these arguments, row-major."""
    named = bind(func, args, kwargs)
    self, dims = named["self"], len(named["kernel_size"])
    with mode:
        result = torch.ops.aten.convolution.default(
            self,
            named["weight"],
            named["bias"],
            named["stride"],
            named["padding"],
            named.get("dilation", [1] * dims),
            "transpose" in func.name(),
            named.get("output_padding", [0] * dims),
            1,
        )
    return fresh(mode, result.shape, None, dtype=result.dtype, device=result.device)
