"""Checks of the shapes that further operands have beside the one that a result is like (weights, samples, statistics), and of
layouts."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels._torch import OpOverload, suggest_memory_format
from fake.kernels.checks.registry import check_for, refuse

__all__ = [
    "boundaries_have_a_dimension",
    "factors_are_as_many_as_reflectors",
    "labelled_images_are_row_major",
    "pooled_volumes_are_no_images",
    "samples_are_for_each_channel",
    "statistics_are_vectors",
    "targets_are_of_the_inputs_dtype",
    "weights_do_not_grow_losses",
]


@check_for("binary_cross_entropy", "binary_cross_entropy_with_logits")
def weights_do_not_grow_losses(func: OpOverload, given: dict[str, Any]) -> None:
    """Losses are multiplied by their weights in place."""
    self = given["self"]
    for name in ("weight", "pos_weight"):
        weight = given.get(name)
        refuse(
            weight is not None and weight.dim() > self.dim(), func,
            f"output with shape {list(self.shape)} doesn't match the broadcast shape of argument {name!r}, "
            f"{list(weight.shape) if weight is not None else None}",
        )  # fmt: skip


@check_for("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def statistics_are_vectors(func: OpOverload, given: dict[str, Any]) -> None:
    """One number for each channel; weights may have other shapes."""
    if given["input"].device.type == "cpu":
        for name in ("running_mean", "running_var"):
            value = given.get(name)
            refuse(
                value is not None and value.dim() != 1, func,
                f"expected 1 dims but tensor has {None if value is None else value.dim()} (argument {name!r})",
            )  # fmt: skip


@check_for("ormqr")
def factors_are_as_many_as_reflectors(func: OpOverload, given: dict[str, Any]) -> None:
    """One for each."""
    self, tau, other = given["self"], given["input2"], given["input3"]
    if min(self.dim(), other.dim()) < 2 or tau.dim() < 1:
        return
    count = torch.sym_min(other.shape[-2 if given["left"] else -1], self.shape[-1])
    refuse(
        tau.shape[-1] != count, func,
        f"tau.shape[-1] must be equal to min(other.shape[-2], input.shape[-1]), {count}, but is {tau.shape[-1]}",
    )  # fmt: skip


@check_for("fractional_max_pool2d", "fractional_max_pool3d")
def samples_are_for_each_channel(func: OpOverload, given: dict[str, Any]) -> None:
    """A number for each spatial dimension of each channel."""
    self, samples = given["self"], given["random_samples"]
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
def boundaries_have_a_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """Along which they are sorted."""
    refuse(
        given["sorted_sequence"].dim() == 0, func,
        "boundaries tensor (argument 'sorted_sequence') should have positive dimension, but got 0 dimension",
    )  # fmt: skip


@check_for("huber_loss_backward")
def targets_are_of_the_inputs_dtype(func: OpOverload, given: dict[str, Any]) -> None:
    """The backward pass does not convert them, as the forward pass does."""
    self, target = given["self"], given["target"]
    refuse(
        self.dtype is not target.dtype, func,
        f"Found dtype {target.dtype} (argument 'target') but expected {self.dtype}",
    )  # fmt: skip


@check_for("nll_loss2d_backward")
def labelled_images_are_row_major(func: OpOverload, given: dict[str, Any]) -> None:
    """The gradient is allocated like the input, and the CPU's kernel writes row-major."""
    self = given["self"]
    refuse(
        self.device.type == "cpu" and not torch.empty_like(self).is_contiguous(), func,
        f"grad_input must be contiguous, and is like argument 'self', of strides {list(self.stride())}",
    )  # fmt: skip


@check_for("max_pool3d_with_indices")
def pooled_volumes_are_no_images(func: OpOverload, given: dict[str, Any]) -> None:
    """One volume without a batch has as many dimensions as images, in whose format the CPU's kernel does not pool."""
    self = given["self"]
    refuse(
        self.device.type == "cpu" and self.dim() == 4 and suggest_memory_format(self) is torch.channels_last, func,
        "Unsupported memory format. Supports only ChannelsLast3d, Contiguous (argument 'self')",
    )  # fmt: skip
