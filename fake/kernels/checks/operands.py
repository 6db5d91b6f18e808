"""Checks of layouts, and of the shapes of weights, samples and statistics."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, is_refused, refuse
from fake.seam.dispatch import has_symbols, suggest_memory_format


@check_for("binary_cross_entropy", "binary_cross_entropy_with_logits")
def check_loss_weight(func: OpOverload, bound: dict[str, Any]) -> None:
    """Losses are multiplied by their weights in place, so weights must not have more dimensions."""
    self = bound["self"]
    for name in ("weight", "pos_weight"):
        weight = bound.get(name)
        refuse(
            weight is not None and weight.dim() > self.dim(), func,
            f"output with shape {list(self.shape)} doesn't match the broadcast shape of argument {name!r}, "
            f"{list(weight.shape) if weight is not None else None}",
        )  # fmt: skip


@check_for("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def check_running_statistics(func: OpOverload, bound: dict[str, Any]) -> None:
    """Running statistics need one number per channel, or the kernel reads out of bounds."""
    input = bound["input"]
    if input.device.type == "cpu":
        for name in ("running_mean", "running_var"):
            value = bound.get(name)
            refuse(
                value is not None and input.dim() > 1 and value.dim() == 1 and value.shape[0] != input.shape[1], func,
                f"argument {name!r} has {value.numel() if value is not None else None} elements for {input.shape[1:2]} channels",
            )  # fmt: skip
            refuse(
                value is not None and value.dim() != 1, func,
                f"expected 1 dims but tensor has {None if value is None else value.dim()} (argument {name!r})",
            )  # fmt: skip


@check_for("native_group_norm")
def check_group_norm(func: OpOverload, bound: dict[str, Any]) -> None:
    """The input must be dense and match N, C and HxW; weight and bias need one element per channel."""
    input, parts = bound["input"], [bound[name] for name in ("N", "C", "HxW")]
    refuse(bound["group"] <= 0, func, f"Expected num groups to be greater than 0, got {bound['group']}")
    refuse(
        parts[1] % bound["group"] != 0,
        func,
        f"{parts[1]} channels are not divisible by {bound['group']} groups",
    )
    refuse(
        any(n < 0 for n in parts) or input.numel() != parts[0] * parts[1] * parts[2], func,
        f"argument 'input' of shape {list(input.shape)} has not N * C * HxW = {parts[0]} * {parts[1]} * {parts[2]} elements",
    )  # fmt: skip
    if input.device.type == "cpu" and not has_symbols(input):
        refuse(
            not input.is_contiguous(memory_format=suggest_memory_format(input)) and is_refused(_groups_with_gaps), func,
            f"argument 'input' of shape {list(input.shape)} and strides {list(input.stride())} is not contiguous in the format "
            "that it suggests",
        )  # fmt: skip
    for name in ("weight", "bias"):
        value = bound[name]
        refuse(
            value is not None and (value.dim() != 1 or value.numel() != bound["C"]), func,
            f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of shape "
            f"{None if value is None else list(value.shape)} and {bound['C']} channels",
        )  # fmt: skip


def _groups_with_gaps() -> Any:
    return torch.native_group_norm(torch.ones(1, 2, 4).mT, None, None, 1, 4, 2, 2, 1e-5)


@check_for("lu_unpack")
def check_lu_pivots(func: OpOverload, bound: dict[str, Any]) -> None:
    """With fewer pivots, the CPU kernel reads out of bounds."""
    data, pivots = bound["LU_data"], bound["LU_pivots"]
    if data.dim() > 1 and pivots.dim() > 0 and bound["unpack_pivots"] and data.device.type == "cpu":
        count = torch.sym_min(data.shape[-2], data.shape[-1])
        refuse(
            pivots.shape[-1] != count, func,
            f"argument 'LU_pivots' has {pivots.shape[-1]} elements for the {count} rows of matrices of {list(data.shape[-2:])}",
        )  # fmt: skip


@check_for("ormqr")
def check_ormqr_tau(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be one factor per reflector."""
    self, tau, other = bound["self"], bound["input2"], bound["input3"]
    if min(self.dim(), other.dim()) < 2 or tau.dim() < 1:
        return
    count = torch.sym_min(other.shape[-2 if bound["left"] else -1], self.shape[-1])
    refuse(
        tau.shape[-1] != count, func,
        f"tau.shape[-1] must be equal to min(other.shape[-2], input.shape[-1]), {count}, but is {tau.shape[-1]}",
    )  # fmt: skip


@check_for("fractional_max_pool2d", "fractional_max_pool3d")
def check_fractional_pool_samples(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be one sample per spatial dimension of each channel."""
    self, samples = bound["self"], bound["random_samples"]
    spatial = 2 if "2d" in func._schema.name else 3
    if self.dim() not in (spatial + 1, spatial + 2):
        return
    refuse(
        samples.dim() != 3, func,
        f"Expect _random_samples to have 3 dimensions, got {samples.dim()}",
    )  # fmt: skip
    wanted = (self.shape[-spatial - 1], spatial)
    refuse(
        tuple(samples.shape[1:]) != wanted, func,
        f"Expect _random_samples to have sizes {list(wanted)} but for the batch, got {list(samples.shape[1:])}",
    )  # fmt: skip


@check_for("searchsorted")
def check_searchsorted_boundaries(func: OpOverload, bound: dict[str, Any]) -> None:
    """Boundaries must have a dimension along which they are sorted."""
    refuse(
        bound["sorted_sequence"].dim() == 0, func,
        "boundaries tensor (argument 'sorted_sequence') should have positive dimension, but got 0 dimension",
    )  # fmt: skip


@check_for("huber_loss_backward")
def check_huber_target_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """The backward pass does not convert the target, unlike the forward pass."""
    self, target = bound["self"], bound["target"]
    refuse(
        self.dtype is not target.dtype, func,
        f"Found dtype {target.dtype} (argument 'target') but expected {self.dtype}",
    )  # fmt: skip


@check_for("nll_loss2d_backward")
def check_nll_loss2d_layout(func: OpOverload, bound: dict[str, Any]) -> None:
    """The gradient is allocated like the input, and the CPU kernel requires it to be row-major."""
    self = bound["self"]
    refuse(
        self.device.type == "cpu" and not torch.empty_like(self).is_contiguous(), func,
        f"grad_input must be contiguous, and is like argument 'self', of strides {list(self.stride())}",
    )  # fmt: skip


@check_for("max_pool3d_with_indices")
def check_max_pool3d_layout(func: OpOverload, bound: dict[str, Any]) -> None:
    """An unbatched volume is 4-D like a batch of images, but CPU kernels refuse channels-last volumes."""
    self = bound["self"]
    refuse(
        self.device.type == "cpu" and self.dim() == 4 and suggest_memory_format(self) is torch.channels_last, func,
        "Unsupported memory format. Supports only ChannelsLast3d, Contiguous (argument 'self')",
    )  # fmt: skip
