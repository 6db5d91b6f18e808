"""Checks of sizes and dtypes that individual kernels make."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, eager_error_class, refuse, wrapped_dim


@check_for("_fft_c2c", "_fft_r2c", "_fft_c2r")
def check_fft_input_nonempty(func: OpOverload, bound: dict[str, Any]) -> None:
    """MKL cannot plan a transform of an empty input."""
    self = bound["self"]
    refuse(
        self.numel() == 0 and self.device.type == "cpu" and torch.backends.mkl.is_available(), func,
        f"MKL has no plan for an input of shape {list(self.shape)}: argument 'self' has no elements",
    )  # fmt: skip


@check_for("sub", "rsub")
def check_no_bool_subtraction(func: OpOverload, bound: dict[str, Any]) -> None:
    """Booleans must be inverted or compared, not subtracted."""
    operands = (bound["self"], bound["other"])
    flags = [
        o for o in operands if isinstance(o, bool) or (isinstance(o, torch.Tensor) and o.dtype is torch.bool)
    ]
    if flags:
        refuse(
            True, func,
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to invert a mask, use the "
            "`~` or `logical_not()` operator instead.",
            eager_error_class(_subtract_bools),
        )  # fmt: skip


def _subtract_bools() -> torch.Tensor:
    return torch.ones(1, dtype=torch.bool) - torch.ones(1, dtype=torch.bool)


@check_for("var", "std", "var_mean", "std_mean")
def check_var_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """Variance and standard deviation need a floating-point or complex tensor."""
    dtype = bound["self"].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        problem = f"std and var only support floating point and complex dtypes, got {dtype}"
        refuse(True, func, problem, eager_error_class(_std_of_integers))


def _std_of_integers() -> torch.Tensor:
    return torch.ones(2, dtype=torch.int64).std()


@check_for("sort", "argsort", "msort")
def check_sort_dim(func: OpOverload, bound: dict[str, Any]) -> None:
    """The dimension must exist."""
    if isinstance(bound.get("dim"), int):
        wrapped_dim(func, bound["dim"], bound["self"].dim())


@check_for("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def check_batch_norm_input(func: OpOverload, bound: dict[str, Any]) -> None:
    """The input needs a channel dimension, and elements if statistics are computed from it."""
    self = bound["input"]
    refuse(
        self.dim() < 2, func,
        f"Dimension out of range (argument 'input' of shape {list(self.shape)} has no dimension 1 for channels)",
        IndexError,
    )  # fmt: skip
    refuse(
        bound.get("training", True) and self.numel() == 0, func,
        f"input tensor must have at least one element, but got input_sizes = {list(self.shape)}",
    )  # fmt: skip


@check_for("multilabel_margin_loss_forward")
def check_multilabel_target(func: OpOverload, bound: dict[str, Any]) -> None:
    """The target must have the shape of the input."""
    self, target = bound["self"], bound["target"]
    if self.dim() <= 2 and self.numel():
        same = target.shape == self.shape
        fits = same if self.dim() == 2 else target.dim() <= 1 and target.numel() == self.numel()
        refuse(
            target.dtype is not torch.int64 and self.device.type == "cpu", func,
            f"expected argument 'target' to have dtype torch.int64, but found {target.dtype}",
        )  # fmt: skip
        refuse(
            not fits, func,
            f"inconsistent target size: {list(target.shape)} for input of size: {list(self.shape)}",
        )  # fmt: skip


@check_for("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def check_adaptive_pool_input(func: OpOverload, bound: dict[str, Any]) -> None:
    """All dimensions except the batch must have elements; 2-D pooling also allows zero channels."""
    self = bound["self"]
    spatial = int(func._schema.name[-2])
    refuse(
        0 in self.shape[1 if self.dim() == 5 else -spatial :], func,
        f"Expected input to have non-zero size for non-batch dimensions, but input has sizes {list(self.shape)}",
    )  # fmt: skip


@check_for("max_pool1d")
def check_max_pool1d_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """The 1-D CPU kernel, which runs if no gradient is needed, supports floating point only."""
    self = bound["self"]
    refuse(
        self.device.type == "cpu" and not self.is_quantized and not self.dtype.is_floating_point, func,
        f"not implemented for {self.dtype} (argument 'self')", NotImplementedError,
    )  # fmt: skip


@check_for("narrow_copy")
def check_narrow_copy_dim(func: OpOverload, bound: dict[str, Any]) -> None:
    """The CPU kernel has its own error for a dimension that is out of range."""
    self = bound["self"]
    refuse(
        self.device.type == "cpu" and 0 < self.dim() <= bound["dim"], func,
        f"argument 'dim' is {bound['dim']}, and argument 'self' has {self.dim()} dimensions",
    )  # fmt: skip


@check_for("bincount")
def check_bincount_weights(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be as many weights as numbers to count."""
    self, weights = bound["self"], bound["weights"]
    refuse(
        weights is not None and weights.shape != self.shape and self.numel() > 0, func,
        "weights should be 1-d and have the same length as input",
    )  # fmt: skip


@check_for("masked_select")
def check_masked_select(func: OpOverload, bound: dict[str, Any]) -> None:
    """The tensor and the mask must broadcast."""
    torch.broadcast_shapes(bound["self"].shape, bound["mask"].shape)


@check_for("_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_histogramdd_bin_edges")
def check_histogramdd_weights(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be one weight per point."""
    self, weight = bound["self"], bound["weight"]
    refuse(
        weight is not None and weight.shape != self.shape[:-1], func,
        "torch.histogramdd: if weight tensor is provided it should have the same shape as the input tensor excluding its "
        f"innermost dimension, but got input with shape {list(self.shape)} and weight of another shape",
    )  # fmt: skip


@check_for("grid_sampler_2d", "grid_sampler_3d")
def check_grid_sampler(func: OpOverload, bound: dict[str, Any]) -> None:
    """The grid must match the input in batch size, rank and coordinates; no spatial size may be 0."""
    self, grid = bound["input"], bound["grid"]
    shapes = f"input has shape {list(self.shape)} and grid {list(grid.shape)}"
    rank = 4 if func._schema.name.endswith("2d") else 5
    refuse(
        self.shape[:1] != grid.shape[:1],
        func,
        f"expected grid and input to have same batch size, but {shapes}",
    )
    refuse(
        grid.shape[-1:] != (self.dim() - 2,), func,
        f"expected grid to have size {self.dim() - 2} in last dimension, but {shapes}",
    )  # fmt: skip
    refuse(0 in self.shape[2:], func, f"expected input to have non-empty spatial dimensions, but {shapes}")
    refuse(
        (self.dim(), grid.dim()) != (rank, rank), func,
        f"expected {rank}D input and grid with same number of dimensions, but {shapes}",
    )  # fmt: skip
    refuse(
        rank == 5 and bound["interpolation_mode"] == 2, func,
        "bicubic interpolation only supports 4D input (argument 'interpolation_mode')",
    )  # fmt: skip


@check_for("convolution", "_convolution")
def check_convolution(func: OpOverload, bound: dict[str, Any]) -> None:
    """Kernels must not be empty. Output padding must be less than the stride or the dilation."""
    weight = bound["weight"]
    _check_convolution_bias(func, bound)
    refuse(
        0 in weight.shape[2:],
        func,
        f"kernel size should be greater than zero, but got {list(weight.shape[2:])}",
    )
    refuse(
        any(n <= 0 for n in bound["dilation"]),
        func,
        f"dilation should be greater than zero, but got {bound['dilation']}",
    )
    if bound["transposed"]:
        spatial = weight.dim() - 2
        steps = [
            list(bound[n]) * (spatial if len(bound[n]) == 1 else 1)
            for n in ("output_padding", "stride", "dilation")
        ]
        for padding, stride, dilation in zip(*steps, strict=False):
            refuse(
                padding >= stride and padding >= dilation and 0 not in bound["input"].shape[:2],
                func,
                f"output padding must be smaller than either stride or dilation, but got {bound['output_padding']}",
            )  # fmt: skip (of nothing, eager checks less)


def _check_convolution_bias(func: OpOverload, bound: dict[str, Any]) -> None:
    """On CPU, 3-D transposed convolutions need one dtype; others may add another bias in place."""
    input, bias = bound["input"], bound["bias"]
    if bias is None or bias.dtype == input.dtype or input.device.type != "cpu" or not bound["transposed"]:
        return
    adds_in_place = bound["weight"].dim() < 5 and torch.can_cast(bias.dtype, input.dtype)
    refuse(
        not adds_in_place and input.numel() > 0, func,
        f"Input type ({input.dtype}) and bias type ({bias.dtype}) should be the same",
    )  # fmt: skip


@check_for("max", "min")
def check_max_input_nonempty(func: OpOverload, bound: dict[str, Any]) -> None:
    """An empty tensor has no maximum or minimum."""
    if set(bound) <= {"self", "out"}:
        refuse(
            bound["self"].numel() == 0, func,
            "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with 'dim'",
        )  # fmt: skip


@check_for("mode", "median", "nanmedian", "kthvalue", "max", "min")
def check_reduced_dim_nonempty(func: OpOverload, bound: dict[str, Any]) -> None:
    """The dimension must have elements."""
    self = bound["self"]
    if self.dim() and isinstance(bound.get("dim"), int):
        dim = wrapped_dim(func, bound["dim"], self.dim())
        refuse(self.shape[dim] == 0, func, f"Expected reduction dim {dim} to have non-zero size.", IndexError)


@check_for("cummax", "cummin")
def check_cummax_dim(func: OpOverload, bound: dict[str, Any]) -> None:
    """A scalar has only dimension 0."""
    problem = (
        f"{func.overloadpacket.__name__}(): Expected reduction dim -1 or 0 for scalar but got {bound['dim']}"
    )
    refuse(bound["self"].dim() == 0 and bound["dim"] not in (0, -1), func, problem, IndexError)


@check_for("linalg_lu_factor_ex", "linalg_lu")
def check_lu_pivoting(func: OpOverload, bound: dict[str, Any]) -> None:
    """LU without pivoting is not implemented on CPU."""
    if not bound["pivot"] and bound["A"].device.type == "cpu":
        problem = "linalg.lu_factor: LU without pivoting is not implemented on the CPU"
        refuse(bound["A"].dim() > 1 and bound["A"].numel() > 0, func, problem)


@check_for("aminmax")
def check_aminmax_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """Complex numbers have no order, not even a single one."""
    if bound["self"].is_complex():
        problem = f"aminmax not implemented for {bound['self'].dtype}"
        refuse(True, func, problem, eager_error_class(_aminmax_of_complex))


def _aminmax_of_complex() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, dtype=torch.complex64).aminmax()


@check_for("nll_loss2d_forward")
def check_nll_loss2d_target(func: OpOverload, bound: dict[str, Any]) -> None:
    """The target must have the shape of the input without the class dimension."""
    self, target = bound["self"], bound["target"]
    refuse(
        self.dim() == 4 and target.dim() == 3 and (self.shape[0], *self.shape[2:]) != tuple(target.shape), func,
        f"size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})",
    )  # fmt: skip


@check_for("soft_margin_loss")
def check_soft_margin_target(func: OpOverload, bound: dict[str, Any]) -> None:
    """Losses are computed in place in the input's shape, so the target must broadcast to that shape."""
    self, target = bound["self"], bound["target"]
    shape = torch.broadcast_shapes(self.shape, target.shape)
    refuse(
        shape != self.shape, func,
        f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(shape)} (argument 'target')",
    )  # fmt: skip


@check_for("_embedding_bag", "_embedding_bag_forward_only")
def check_embedding_bag(func: OpOverload, bound: dict[str, Any]) -> None:
    """Indices need rows to look up. With mode ``max`` and no bags, the CPU kernel writes out of bounds."""
    refuse(
        bound["weight"].shape[0] == 0 and bound["indices"].numel() > 0, func,
        "indices must be in the range [0, 0): argument 'weight' has no rows",
    )  # fmt: skip
    bags = bound["offsets"].numel()
    refuse(
        bound["mode"] == 2 and bags == 0 and bound["indices"].numel() > 0 and bound["weight"].device.type == "cpu", func,
        "there is no bag for the indices: argument 'offsets' has no elements",
    )  # fmt: skip


@check_for("cholesky_inverse", "_pdist_forward")
def check_kernel_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """CPU kernels support float32 and float64 (LAPACK also complex), unless there are no distances."""
    self = bound["self"]
    distances = func._schema.name == "aten::_pdist_forward"
    allowed = self.dtype in (torch.float32, torch.float64) or (self.is_complex() and not distances)
    if allowed or self.device.type != "cpu" or (distances and (self.shape[0] < 2 or self.shape[1] == 0)):
        return
    refuse(True, func, f"not implemented for {self.dtype} (argument 'self')", NotImplementedError)


@check_for("pixel_shuffle", "pixel_unshuffle")
def check_pixel_shuffle_factor(func: OpOverload, bound: dict[str, Any]) -> None:
    """The factor must be positive."""
    name = "upscale_factor" if "upscale_factor" in bound else "downscale_factor"
    refuse(bound[name] <= 0, func, f"expects a positive {name}, but got {bound[name]}")


@check_for("im2col")
def check_im2col_padding(func: OpOverload, bound: dict[str, Any]) -> None:
    """Padding must not be negative."""
    refuse(
        any(n < 0 for n in bound["padding"]),
        func,
        f"padding should be non-negative, but got {bound['padding']}",
    )


@check_for("mvlgamma")
def check_mvlgamma_dimension(func: OpOverload, bound: dict[str, Any]) -> None:
    """The dimension ``p`` must be at least 1."""
    refuse(bound["p"] < 1, func, f"p has to be greater than or equal to 1, but got {bound['p']}")


@check_for("pixel_unshuffle")
def check_pixel_unshuffle_size(func: OpOverload, bound: dict[str, Any]) -> None:
    """Height and width must be multiples of the factor, even if the image is empty."""
    self, factor = bound["self"], bound["downscale_factor"]
    refuse(
        self.dim() >= 3 and factor > 0 and any(size % factor for size in self.shape[-2:]), func,
        f"expects height and width {list(self.shape[-2:])} to be divisible by downscale_factor {factor}",
    )  # fmt: skip


@check_for("bucketize")
def check_bucketize_boundaries(func: OpOverload, bound: dict[str, Any]) -> None:
    """Boundaries must be a vector."""
    rank = bound["boundaries"].dim()
    refuse(rank != 1, func, f"boundaries tensor must be 1 dimension, but got dim({rank})")


@check_for("multinomial")
def check_multinomial(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be samples to draw; without replacement, no more than categories."""
    refuse(
        bound["num_samples"] <= 0,
        func,
        f"cannot sample n_sample <= 0 samples, but got {bound['num_samples']}",
    )
    refuse(
        not bound["replacement"] and bound["num_samples"] > bound["self"].shape[-1], func,
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )  # fmt: skip


@check_for("rand_like", "randn_like")
def check_random_like_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """Random floats cannot fill integer tensors; only ``randn_like`` allows it if there are no elements."""
    self = bound["self"]
    dtype = bound["dtype"] or self.dtype
    integral = not dtype.is_floating_point and not dtype.is_complex
    refuse(
        integral and (func._schema.name == "aten::rand_like" or self.numel() > 0),
        func,
        f"not implemented for {dtype}: use randint_like for integers",
        NotImplementedError,
    )


@check_for("linspace", "logspace")
def check_linspace_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """The dtype must not be bool."""
    dtype = bound["out"].dtype if bound.get("out") is not None else bound.get("dtype")
    refuse(
        dtype is torch.bool, func, "not implemented for torch.bool (argument 'dtype')", NotImplementedError
    )


@check_for("segment_reduce")
def check_segment_reduce(func: OpOverload, bound: dict[str, Any]) -> None:
    """Segments must be integers along the last dimension of ``lengths`` or ``offsets``, and not empty."""
    data, axis, reduce = bound["data"], bound["axis"], bound["reduce"]
    name = "lengths" if bound["lengths"] is not None else "offsets"
    segments = bound[name]
    refuse(
        reduce not in ("sum", "mean", "max", "min", "prod"), func,
        f"reduce argument must be either sum, prod, mean, max or min, got {reduce}",
    )  # fmt: skip
    if segments is None:
        return
    refuse(
        name == "lengths" and not bound["unsafe"] and segments.numel() == 0, func,
        f"expected reduction dim to be specified for {name}.numel() == 0: there is no segment",
    )  # fmt: skip
    if data.numel() == 0:
        return
    axis = wrapped_dim(func, axis, data.dim())
    refuse(
        axis != segments.dim() - 1, func,
        f"expected axis to be the last dimension of {name} but got {axis} for {segments.dim()} dimensions",
    )  # fmt: skip
    if data.device.type == "cpu":
        integral = segments.dtype in (torch.int32, torch.int64)
        refuse(
            not integral, func,
            f"not implemented for {segments.dtype} (argument '{name}')",
            NotImplementedError,
        )  # fmt: skip
        refuse(
            not data.dtype.is_floating_point,
            func,
            f"not implemented for {data.dtype} (argument 'data')",
            NotImplementedError,
        )
