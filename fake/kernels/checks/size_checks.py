"""Checks of sizes and dtypes that individual kernels make."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, refuse, refused_with, wrapped_dim


@check_for("_fft_c2c", "_fft_r2c", "_fft_c2r")
def has_signal(func: OpOverload, given: dict[str, Any]) -> None:
    """MKL cannot plan a transform of an empty input."""
    self = given["self"]
    refuse(
        self.numel() == 0 and self.device.type == "cpu" and torch.backends.mkl.is_available(), func,
        f"MKL has no plan for an input of shape {list(self.shape)}: argument 'self' has no elements",
    )  # fmt: skip


@check_for("sub", "rsub")
def subtracts_no_flags(func: OpOverload, given: dict[str, Any]) -> None:
    """Booleans must be inverted or compared, not subtracted."""
    operands = (given["self"], given["other"])
    flags = [
        o for o in operands if isinstance(o, bool) or (isinstance(o, torch.Tensor) and o.dtype is torch.bool)
    ]
    if flags:
        refuse(
            True, func,
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to invert a mask, use the "
            "`~` or `logical_not()` operator instead.",
            refused_with(_difference_of_flags),
        )  # fmt: skip


def _difference_of_flags() -> torch.Tensor:
    return torch.ones(1, dtype=torch.bool) - torch.ones(1, dtype=torch.bool)


@check_for("var", "std", "var_mean", "std_mean")
def deviates_in_floating_point(func: OpOverload, given: dict[str, Any]) -> None:
    """Variance and standard deviation need a floating-point or complex tensor."""
    dtype = given["self"].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        problem = f"std and var only support floating point and complex dtypes, got {dtype}"
        refuse(True, func, problem, refused_with(_deviation_of_integers))


def _deviation_of_integers() -> torch.Tensor:
    return torch.ones(2, dtype=torch.int64).std()


@check_for("sort", "argsort", "msort")
def sorts_along_a_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """The dimension must exist."""
    if isinstance(given.get("dim"), int):
        wrapped_dim(func, given["dim"], given["self"].dim())


@check_for("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def normalizes_something(func: OpOverload, given: dict[str, Any]) -> None:
    """The input needs a channel dimension, and elements if statistics are computed from it."""
    self = given["input"]
    refuse(
        self.dim() < 2, func,
        f"Dimension out of range (argument 'input' of shape {list(self.shape)} has no dimension 1 for channels)",
        IndexError,
    )  # fmt: skip
    refuse(
        given.get("training", True) and self.numel() == 0, func,
        f"input tensor must have at least one element, but got input_sizes = {list(self.shape)}",
    )  # fmt: skip


@check_for("multilabel_margin_loss_forward")
def one_target_per_class(func: OpOverload, given: dict[str, Any]) -> None:
    """The target must have the shape of the input."""
    self, target = given["self"], given["target"]
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
def pools_something(func: OpOverload, given: dict[str, Any]) -> None:
    """All dimensions except the batch must have elements; 2-D pooling also allows zero channels."""
    self = given["self"]
    spatial = int(func._schema.name[-2])
    refuse(
        0 in self.shape[1 if self.dim() == 5 else -spatial :], func,
        f"Expected input to have non-zero size for non-batch dimensions, but input has sizes {list(self.shape)}",
    )  # fmt: skip


@check_for("max_pool1d")
def pools_rows_of_floats(func: OpOverload, given: dict[str, Any]) -> None:
    """The 1-D CPU kernel, which runs if no gradient is needed, supports floating point only."""
    self = given["self"]
    refuse(
        self.device.type == "cpu" and not self.is_quantized and not self.dtype.is_floating_point, func,
        f"not implemented for {self.dtype} (argument 'self')", NotImplementedError,
    )  # fmt: skip


@check_for("narrow_copy")
def has_dimension_to_narrow(func: OpOverload, given: dict[str, Any]) -> None:
    """The CPU kernel has its own error for a dimension that is out of range."""
    self = given["self"]
    refuse(
        self.device.type == "cpu" and 0 < self.dim() <= given["dim"], func,
        f"argument 'dim' is {given['dim']}, and argument 'self' has {self.dim()} dimensions",
    )  # fmt: skip


@check_for("bincount")
def one_weight_per_number(func: OpOverload, given: dict[str, Any]) -> None:
    """There must be as many weights as numbers to count."""
    self, weights = given["self"], given["weights"]
    refuse(
        weights is not None and weights.shape != self.shape and self.numel() > 0, func,
        "weights should be 1-d and have the same length as input",
    )  # fmt: skip


@check_for("masked_select")
def mask_fits(func: OpOverload, given: dict[str, Any]) -> None:
    """The tensor and the mask must broadcast."""
    torch.broadcast_shapes(given["self"].shape, given["mask"].shape)


@check_for("_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_histogramdd_bin_edges")
def one_weight_per_point(func: OpOverload, given: dict[str, Any]) -> None:
    """There must be one weight per point."""
    self, weight = given["self"], given["weight"]
    refuse(
        weight is not None and weight.shape != self.shape[:-1], func,
        "torch.histogramdd: if weight tensor is provided it should have the same shape as the input tensor excluding its "
        f"innermost dimension, but got input with shape {list(self.shape)} and weight of another shape",
    )  # fmt: skip


@check_for("grid_sampler_2d", "grid_sampler_3d")
def grid_fits_input(func: OpOverload, given: dict[str, Any]) -> None:
    """The grid must match the input in batch size, rank and coordinates; no spatial size may be 0."""
    self, grid = given["input"], given["grid"]
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
        rank == 5 and given["interpolation_mode"] == 2, func,
        "bicubic interpolation only supports 4D input (argument 'interpolation_mode')",
    )  # fmt: skip


@check_for("convolution", "_convolution")
def kernel_and_padding(func: OpOverload, given: dict[str, Any]) -> None:
    """Kernels must not be empty. Output padding must be less than the stride or the dilation."""
    weight = given["weight"]
    _bias_can_be_added(func, given)
    refuse(
        0 in weight.shape[2:],
        func,
        f"kernel size should be greater than zero, but got {list(weight.shape[2:])}",
    )
    refuse(
        any(n <= 0 for n in given["dilation"]),
        func,
        f"dilation should be greater than zero, but got {given['dilation']}",
    )
    if given["transposed"]:
        spatial = weight.dim() - 2
        steps = [
            list(given[n]) * (spatial if len(given[n]) == 1 else 1)
            for n in ("output_padding", "stride", "dilation")
        ]
        for padding, stride, dilation in zip(*steps, strict=False):
            refuse(
                padding >= stride and padding >= dilation and 0 not in given["input"].shape[:2],
                func,
                f"output padding must be smaller than either stride or dilation, but got {given['output_padding']}",
            )  # fmt: skip (of nothing, eager checks less)


def _bias_can_be_added(func: OpOverload, given: dict[str, Any]) -> None:
    """On CPU, 3-D transposed convolutions need one dtype; others may add another bias in place."""
    input, bias = given["input"], given["bias"]
    if bias is None or bias.dtype == input.dtype or input.device.type != "cpu" or not given["transposed"]:
        return
    adds_in_place = given["weight"].dim() < 5 and torch.can_cast(bias.dtype, input.dtype)
    refuse(
        not adds_in_place and input.numel() > 0, func,
        f"Input type ({input.dtype}) and bias type ({bias.dtype}) should be the same",
    )  # fmt: skip


@check_for("max", "min")
def reduces_something(func: OpOverload, given: dict[str, Any]) -> None:
    """An empty tensor has no maximum or minimum."""
    if set(given) <= {"self", "out"}:
        refuse(
            given["self"].numel() == 0, func,
            "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with 'dim'",
        )  # fmt: skip


@check_for("mode", "median", "nanmedian", "kthvalue", "max", "min")
def reduces_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """The dimension must have elements."""
    self = given["self"]
    if self.dim() and isinstance(given.get("dim"), int):
        dim = wrapped_dim(func, given["dim"], self.dim())
        refuse(self.shape[dim] == 0, func, f"Expected reduction dim {dim} to have non-zero size.", IndexError)


@check_for("cummax", "cummin")
def accumulates_along_a_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """A scalar has only dimension 0."""
    problem = (
        f"{func.overloadpacket.__name__}(): Expected reduction dim -1 or 0 for scalar but got {given['dim']}"
    )
    refuse(given["self"].dim() == 0 and given["dim"] not in (0, -1), func, problem, IndexError)


@check_for("linalg_lu_factor_ex", "linalg_lu")
def pivots_on_the_cpu(func: OpOverload, given: dict[str, Any]) -> None:
    """LU without pivoting is not implemented on CPU."""
    if not given["pivot"] and given["A"].device.type == "cpu":
        problem = "linalg.lu_factor: LU without pivoting is not implemented on the CPU"
        refuse(given["A"].dim() > 1 and given["A"].numel() > 0, func, problem)


@check_for("aminmax")
def extremes_are_ordered(func: OpOverload, given: dict[str, Any]) -> None:
    """Complex numbers have no order, not even a single one."""
    if given["self"].is_complex():
        problem = f"aminmax not implemented for {given['self'].dtype}"
        refuse(True, func, problem, refused_with(_order_of_complex_numbers))


def _order_of_complex_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, dtype=torch.complex64).aminmax()


@check_for("nll_loss2d_forward")
def one_target_per_pixel(func: OpOverload, given: dict[str, Any]) -> None:
    """The target must have the shape of the input without the class dimension."""
    self, target = given["self"], given["target"]
    refuse(
        self.dim() == 4 and target.dim() == 3 and (self.shape[0], *self.shape[2:]) != tuple(target.shape), func,
        f"size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})",
    )  # fmt: skip


@check_for("soft_margin_loss")
def targets_add_no_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """Losses are computed in place in the input's shape, so the target must broadcast to that shape."""
    self, target = given["self"], given["target"]
    shape = torch.broadcast_shapes(self.shape, target.shape)
    refuse(
        shape != self.shape, func,
        f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(shape)} (argument 'target')",
    )  # fmt: skip


@check_for("_embedding_bag", "_embedding_bag_forward_only")
def has_rows_to_take(func: OpOverload, given: dict[str, Any]) -> None:
    """Indices need rows to look up. With mode ``max`` and no bags, the CPU kernel writes out of bounds."""
    refuse(
        given["weight"].shape[0] == 0 and given["indices"].numel() > 0, func,
        "indices must be in the range [0, 0): argument 'weight' has no rows",
    )  # fmt: skip
    bags = given["offsets"].numel()
    refuse(
        given["mode"] == 2 and bags == 0 and given["indices"].numel() > 0 and given["weight"].device.type == "cpu", func,
        "there is no bag for the indices: argument 'offsets' has no elements",
    )  # fmt: skip


@check_for("cholesky_inverse", "_pdist_forward")
def is_computed_in(func: OpOverload, given: dict[str, Any]) -> None:
    """CPU kernels support float32 and float64 (LAPACK also complex), unless there are no distances."""
    self = given["self"]
    distances = func._schema.name == "aten::_pdist_forward"
    allowed = self.dtype in (torch.float32, torch.float64) or (self.is_complex() and not distances)
    if allowed or self.device.type != "cpu" or (distances and (self.shape[0] < 2 or self.shape[1] == 0)):
        return
    refuse(True, func, f"not implemented for {self.dtype} (argument 'self')", NotImplementedError)


@check_for("pixel_shuffle", "pixel_unshuffle")
def has_factor(func: OpOverload, given: dict[str, Any]) -> None:
    """The factor must be positive."""
    name = "upscale_factor" if "upscale_factor" in given else "downscale_factor"
    refuse(given[name] <= 0, func, f"expects a positive {name}, but got {given[name]}")


@check_for("im2col")
def pads_forwards(func: OpOverload, given: dict[str, Any]) -> None:
    """Padding must not be negative."""
    refuse(
        any(n < 0 for n in given["padding"]),
        func,
        f"padding should be non-negative, but got {given['padding']}",
    )


@check_for("mvlgamma")
def has_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """The dimension ``p`` must be at least 1."""
    refuse(given["p"] < 1, func, f"p has to be greater than or equal to 1, but got {given['p']}")


@check_for("pixel_unshuffle")
def blocks_fill_image(func: OpOverload, given: dict[str, Any]) -> None:
    """Height and width must be multiples of the factor, even if the image is empty."""
    self, factor = given["self"], given["downscale_factor"]
    refuse(
        self.dim() >= 3 and factor > 0 and any(size % factor for size in self.shape[-2:]), func,
        f"expects height and width {list(self.shape[-2:])} to be divisible by downscale_factor {factor}",
    )  # fmt: skip


@check_for("bucketize")
def has_vector_of_boundaries(func: OpOverload, given: dict[str, Any]) -> None:
    """Boundaries must be a vector."""
    rank = given["boundaries"].dim()
    refuse(rank != 1, func, f"boundaries tensor must be 1 dimension, but got dim({rank})")


@check_for("multinomial")
def has_enough_to_sample(func: OpOverload, given: dict[str, Any]) -> None:
    """There must be samples to draw; without replacement, no more than categories."""
    refuse(
        given["num_samples"] <= 0,
        func,
        f"cannot sample n_sample <= 0 samples, but got {given['num_samples']}",
    )
    refuse(
        not given["replacement"] and given["num_samples"] > given["self"].shape[-1], func,
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )  # fmt: skip


@check_for("rand_like", "randn_like")
def random_numbers_are_floating(func: OpOverload, given: dict[str, Any]) -> None:
    """Random floats cannot fill integer tensors; only ``randn_like`` allows it if there are no elements."""
    self = given["self"]
    dtype = given["dtype"] or self.dtype
    integral = not dtype.is_floating_point and not dtype.is_complex
    refuse(
        integral and (func._schema.name == "aten::rand_like" or self.numel() > 0),
        func,
        f"not implemented for {dtype}: use randint_like for integers",
        NotImplementedError,
    )


@check_for("linspace", "logspace")
def spaces_are_numbers(func: OpOverload, given: dict[str, Any]) -> None:
    """The dtype must not be bool."""
    dtype = given["out"].dtype if given.get("out") is not None else given.get("dtype")
    refuse(
        dtype is torch.bool, func, "not implemented for torch.bool (argument 'dtype')", NotImplementedError
    )


@check_for("segment_reduce")
def reduces_segments(func: OpOverload, given: dict[str, Any]) -> None:
    """Segments must be integers along the last dimension of ``lengths`` or ``offsets``, and not empty."""
    data, axis, reduce = given["data"], given["axis"], given["reduce"]
    name = "lengths" if given["lengths"] is not None else "offsets"
    segments = given[name]
    refuse(
        reduce not in ("sum", "mean", "max", "min", "prod"), func,
        f"reduce argument must be either sum, prod, mean, max or min, got {reduce}",
    )  # fmt: skip
    if segments is None:
        return
    refuse(
        name == "lengths" and not given["unsafe"] and segments.numel() == 0, func,
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
