"""What eager checks before it computes, and meta kernels forget: sizes, ranges and numbers, one function a check.

A check takes the call's arguments by name, defaults filled in. It raises what eager raises, or returns; it knows nothing
of symbolic sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fake.kernels._torch import OpOverload

__all__ = ["Check", "bind", "check_arguments", "checks_of", "extent"]

Check = Callable[[OpOverload, dict[str, Any]], None]

_CHECKS: dict[str, list[Check]] = {}


def _for(*names: str) -> Callable[[Check], Check]:
    """Register a check for all overloads of operators, in place and with ``out=`` too."""

    def register(check: Check) -> Check:
        for name in names:
            _CHECKS.setdefault(name, []).append(check)
        return check

    return register


def checks_of(func: OpOverload) -> tuple[Check, ...]:
    """The checks of an operator."""
    if func.namespace != "aten":
        return ()
    name = func._schema.name.split("::")[1]
    return tuple(_CHECKS.get(name, ()) or _CHECKS.get(name.rstrip("_"), ()))


def bind(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name, defaults included.

    >>> bind(torch.ops.aten.narrow.default, ("x", 0), {"start": 1, "length": 2})
    {'self': 'x', 'dim': 0, 'start': 1, 'length': 2}
    """
    bound = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            bound[argument.name] = args[place]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def check_arguments(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Run an operator's checks."""
    checks = _checks_of(func)
    if checks:
        bound = bind(func, args, kwargs)
        for check in checks:
            check(func, bound)


_checks_of = functools.cache(checks_of)


def _refuse(condition: bool, func: OpOverload, problem: str, error: type[Exception] = RuntimeError) -> None:
    if condition:
        raise error(f"{func}: {problem}")


def _dim(func: OpOverload, dim: int, rank: int) -> int:
    limit = max(rank, 1)
    _refuse(
        not -limit <= dim < limit, func,
        f"Dimension out of range (expected dim to be in range of [{-limit}, {limit - 1}], but got {dim})", IndexError,
    )  # fmt: skip
    return dim % limit


def extent(sizes: Any, strides: Any, offset: int) -> int:
    """How many elements a storage must have for a tensor.

    >>> extent((2, 3), (3, 1), 4)
    10
    """
    if 0 in sizes:
        return 0
    return offset + 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


@_for("as_strided", "as_strided_copy", "as_strided_scatter")
def in_bounds_of_storage(func: OpOverload, given: dict[str, Any]) -> None:
    """Sizes, strides and offset stay inside the storage."""
    self, sizes, strides = given["self"], given["size"], given["stride"]
    offset = self.storage_offset() if given["storage_offset"] is None else given["storage_offset"]
    if len(sizes) != len(strides):
        return
    needed = extent(sizes, strides, offset) * self.dtype.itemsize
    held = self.untyped_storage().nbytes()
    if "scatter" in func.name():  # works on a copy that is no larger than it must be
        held = extent(self.shape, self.stride(), self.storage_offset()) * self.dtype.itemsize
    _refuse(
        needed > held, func,
        f"sizes {list(sizes)}, strides {list(strides)}, storage offset {offset}, and itemsize {self.dtype.itemsize} "
        f"requiring a storage size of {needed} are out of bounds for storage of size {held}",
    )  # fmt: skip


@_for("_fft_c2c", "_fft_r2c", "_fft_c2r")
def has_signal(func: OpOverload, given: dict[str, Any]) -> None:
    """MKL makes no plan for a batch of none."""
    self = given["self"]
    _refuse(
        self.numel() == 0 and self.device.type == "cpu" and torch.backends.mkl.is_available(), func,
        f"MKL has no plan for an input of shape {list(self.shape)}: argument 'self' has no elements",
    )  # fmt: skip


@_for("gather", "scatter", "scatter_add", "scatter_reduce")
def no_index_into_nothing(func: OpOverload, given: dict[str, Any]) -> None:
    """Whatever an index says, it is out of bounds of an empty dimension."""
    self, index = given["self"], given["index"]
    dim = _dim(func, given["dim"], self.dim())
    size = self.shape[dim] if self.dim() else 1
    _refuse(
        index.numel() > 0 and size == 0, func,
        f"argument 'index' has elements and is out of bounds for dimension {dim} with size 0",
    )  # fmt: skip


@_for("index_select")
def selects_by_a_vector(func: OpOverload, given: dict[str, Any]) -> None:
    """The index is a vector; of a scalar there is one element to select."""
    self, index = given["self"], given["index"]
    dim = _dim(func, given["dim"], self.dim())
    _refuse(index.dim() > 1, func, "Index is supposed to be a vector", IndexError)
    _refuse(
        self.dim() == 0 and index.numel() != 1, func,
        f"Index to scalar can have only 1 value, got {index.numel()} value(s)",
    )  # fmt: skip
    _refuse(
        self.dim() > 0 and self.shape[dim] == 0 and index.numel() > 0, func,
        f"self indexing axis dim {dim} should be positive",
    )  # fmt: skip


@_for("embedding")
def embeds_from_something(func: OpOverload, given: dict[str, Any]) -> None:
    """Weights are a matrix, with rows if there is anything to look up."""
    weight, indices = given["weight"], given["indices"]
    _refuse(weight.dim() != 2, func, f"'weight' must be 2-D, got {weight.dim()}-D")
    _refuse(weight.shape[0] == 0 and indices.numel() > 0, func, "'weight' has no rows to look up")


@_for("put")
def puts_as_many_as_places(func: OpOverload, given: dict[str, Any]) -> None:
    """As many values as indices, and somewhere to put them."""
    self, index, source = given["self"], given["index"], given["source"]
    _refuse(
        index.numel() != source.numel(), func,
        f"Expected source and index to have the same number of elements, but got source.numel() = {source.numel()}, "
        f"index.numel() = {index.numel()}", IndexError,
    )  # fmt: skip
    _refuse(
        self.numel() == 0 and index.numel() > 0,
        func,
        "Tried to put elements into an empty tensor",
        IndexError,
    )


@_for("take")
def takes_from_something(func: OpOverload, given: dict[str, Any]) -> None:
    """An empty tensor has nothing to take."""
    _refuse(
        given["self"].numel() == 0 and given["index"].numel() > 0,
        func,
        "tried to take from an empty tensor",
        IndexError,
    )


@_for("slice_scatter")
def source_fits_slice(func: OpOverload, given: dict[str, Any]) -> None:
    """The source has the shape of the slice."""
    self, src, step = given["self"], given["src"], given["step"]
    _refuse(step <= 0, func, "slice step must be positive")
    dim = _dim(func, given["dim"], self.dim())
    shape = list(self.shape)
    shape[dim] = len(range(*slice(given["start"], given["end"], step).indices(shape[dim])))
    _refuse(
        list(src.shape) != shape, func,
        f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = {shape}",
    )  # fmt: skip


@_for("select_scatter", "diagonal_scatter")
def source_fits_view(func: OpOverload, given: dict[str, Any]) -> None:
    """The source has the shape of the view that it replaces."""
    self, src = given["self"].to("meta"), given["src"]
    if "index" in given:
        shape = torch.select(self, given["dim"], given["index"]).shape
    else:
        shape = torch.diagonal(self, given["offset"], given["dim1"], given["dim2"]).shape
    _refuse(
        src.shape != shape, func,
        f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = {list(shape)}",
    )  # fmt: skip


@_for("sort", "argsort", "msort")
def sorts_along_a_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """The dimension is there."""
    if isinstance(given.get("dim"), int):
        _dim(func, given["dim"], given["self"].dim())


@_for("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def normalizes_something(func: OpOverload, given: dict[str, Any]) -> None:
    """A batch to take statistics of has elements."""
    self = given["input"]
    _refuse(
        self.numel() == 0 and given.get("training", True), func,
        f"input tensor must have at least one element, but got input_sizes = {list(self.shape)}",
    )  # fmt: skip


@_for("multilabel_margin_loss_forward")
def one_target_per_class(func: OpOverload, given: dict[str, Any]) -> None:
    """The target has the shape of the input."""
    self, target = given["self"], given["target"]
    if self.dim() in (1, 2) and self.numel():
        sizes = (self.shape, (1, *self.shape)) if self.dim() == 1 else (self.shape,)
        _refuse(
            target.shape not in sizes, func,
            f"inconsistent target size: {list(target.shape)} for input of size: {list(self.shape)}",
        )  # fmt: skip


def _indexed_shape(shape: Any, indices: Any) -> list[int] | None:
    """The shape of ``self[indices]``, or ``None`` if a mask makes it depend on values."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    places = [place for place, index in enumerate(indices) if index is not None]
    if not places or len(indices) > len(shape):
        return None
    common = list(torch.broadcast_shapes(*(indices[place].shape for place in places)))
    kept = [size for place, size in enumerate(shape) if place not in places]
    adjacent = places == list(range(places[0], places[-1] + 1))
    front = sum(place < places[0] for place in range(len(shape)) if place not in places) if adjacent else 0
    return [*kept[:front], *common, *kept[front:]]


@_for("index", "index_put", "_index_put_impl", "_unsafe_index_put")
def indices_fit(func: OpOverload, given: dict[str, Any]) -> None:
    """Indices broadcast, masks have the shape of what they mask, and nothing is looked up in an empty dimension."""
    self, indices = given["self"], given["indices"]
    place = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            for own, size in enumerate(index.shape):
                _refuse(
                    place + own >= self.dim() or self.shape[place + own] != size, func,
                    f"The shape of the mask {list(index.shape)} at index {own} does not match the shape of the indexed "
                    f"tensor {list(self.shape)} at index {place + own}", IndexError,
                )  # fmt: skip
            place += index.dim()
        else:
            place += 1
    shapes = [i.shape for i in indices if i is not None and i.dtype not in (torch.bool, torch.uint8)]
    try:
        common = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise IndexError(
            f"{func}: shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{[list(s) for s in shapes]}"
        ) from None
    for place, index in enumerate(indices):
        empty = index is not None and place < self.dim() and self.shape[place] == 0
        _refuse(
            empty and _indexed_shape(self.shape, indices) is not None and math.prod(common) > 0, func,
            f"index is out of bounds for dimension {place} with size 0", IndexError,
        )  # fmt: skip


@_for("index_put", "_index_put_impl", "_unsafe_index_put")
def values_fit_indices(func: OpOverload, given: dict[str, Any]) -> None:
    """The values can be broadcast to what is indexed."""
    shape = _indexed_shape(given["self"].shape, given["indices"])
    values = given["values"].shape
    if shape is None:
        return
    fits = len(values) <= len(shape) and all(
        a in (1, b) for a, b in zip(reversed(values), reversed(shape), strict=False)
    )
    # eager drops leading dimensions of size 1 from the values
    fits = fits or (
        math.prod(values[: len(values) - len(shape)]) == 1 and tuple(values[-len(shape) :]) == tuple(shape)
    )
    _refuse(
        not fits, func,
        f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to indexing result of shape {shape}",
    )  # fmt: skip


@_for("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def pools_something(func: OpOverload, given: dict[str, Any]) -> None:
    """All dimensions but the batch have elements."""
    self = given["self"]
    spatial = int(func._schema.name[-2])
    _refuse(
        0 in self.shape[-spatial:], func,
        f"Expected input to have non-zero size for non-batch dimensions, but input has sizes {list(self.shape)}",
    )  # fmt: skip


@_for("convolution", "_convolution")
def kernel_and_padding(func: OpOverload, given: dict[str, Any]) -> None:
    """Kernels have elements, and a transposed convolution is padded by less than a step."""
    weight = given["weight"]
    _refuse(
        0 in weight.shape[2:],
        func,
        f"kernel size should be greater than zero, but got {list(weight.shape[2:])}",
    )
    if given["transposed"]:
        spatial = weight.dim() - 2
        steps = [
            list(given[n]) * (spatial if len(given[n]) == 1 else 1)
            for n in ("output_padding", "stride", "dilation")
        ]
        for padding, stride, dilation in zip(*steps, strict=False):
            _refuse(
                padding >= stride and padding >= dilation, func,
                f"output padding must be smaller than either stride or dilation, but got {given['output_padding']}",
            )  # fmt: skip


@_for("max", "min")
def reduces_something(func: OpOverload, given: dict[str, Any]) -> None:
    """Of nothing there is no extreme."""
    if set(given) <= {"self", "out"}:
        _refuse(
            given["self"].numel() == 0, func,
            "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with 'dim'",
        )  # fmt: skip


@_for("mode", "median", "nanmedian", "kthvalue")
def reduces_dimension(func: OpOverload, given: dict[str, Any]) -> None:
    """The dimension has elements."""
    self = given["self"]
    if self.dim() and isinstance(given.get("dim"), int):
        dim = _dim(func, given["dim"], self.dim())
        _refuse(
            self.shape[dim] == 0, func, f"Expected reduction dim {dim} to have non-zero size.", IndexError
        )


@_for("bucketize")
def has_vector_of_boundaries(func: OpOverload, given: dict[str, Any]) -> None:
    """Boundaries are a vector."""
    rank = given["boundaries"].dim()
    _refuse(rank != 1, func, f"boundaries tensor must be 1 dimension, but got dim({rank})")


@_for("random")
def has_range(func: OpOverload, given: dict[str, Any]) -> None:
    """There is a number to draw."""
    if given.get("to") is not None and "from" in given:
        low, high = given["from"], given["to"]
        _refuse(
            low >= high, func, f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )


@_for("multinomial")
def has_enough_to_draw(func: OpOverload, given: dict[str, Any]) -> None:
    """Without replacement no more samples than categories."""
    _refuse(
        not given["replacement"] and given["num_samples"] > given["self"].shape[-1], func,
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )  # fmt: skip


@_for("addmm")
def product_can_take(func: OpOverload, given: dict[str, Any]) -> None:
    """What is added to a matrix product has at most two dimensions."""
    rank = given["self"].dim()
    _refuse(
        rank > 2, func, f"argument 'self' has {rank} dimensions and cannot be expanded to the product's two"
    )


@_for("native_group_norm")
def one_weight_per_channel(func: OpOverload, given: dict[str, Any]) -> None:
    """Weight and bias are vectors with an element for each channel."""
    for name in ("weight", "bias"):
        value = given[name]
        _refuse(
            value is not None and (value.dim() != 1 or value.numel() != given["C"]), func,
            f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of shape "
            f"{None if value is None else list(value.shape)} and {given['C']} channels",
        )  # fmt: skip


#: Numbers that eager converts to the dtype of the result, by operator.
_CONVERTED = {
    ("fill", "fill_", "masked_fill", "masked_fill_", "constant_pad_nd"): ("value",),
    ("full", "full_like", "new_full"): ("fill_value",),
    ("scatter", "scatter_", "index_fill", "index_fill_", "addcmul", "addcmul_", "addcdiv", "addcdiv_"): ("value",),
    ("addmm", "addmm_", "addbmm", "addbmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "addr", "addr_"): ("beta", "alpha"),
    ("lerp", "lerp_"): ("weight",),
    ("threshold", "threshold_"): ("threshold", "value"),
    ("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"): ("min", "max"),
}  # fmt: skip


def _numbers(func: OpOverload, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    name = func._schema.name.split("::")[1]
    for names, arguments in _CONVERTED.items():
        if name in names:
            yield from (
                (a, given[a]) for a in arguments if isinstance(given.get(a), bool | int | float | complex)
            )


@_for(*{name for names in _CONVERTED for name in names})
def numbers_can_be_held(func: OpOverload, given: dict[str, Any]) -> None:
    """A number fits into the dtype that it is converted to (c10's checked conversion)."""
    like = given.get("self")
    tensors = [given[n] for n in ("self", "out") if isinstance(given.get(n), torch.Tensor)]
    if tensors and any(t.numel() == 0 for t in tensors):
        return
    dtype = given.get("dtype") or (like.dtype if isinstance(like, torch.Tensor) else None)
    if dtype is None:
        return
    for name, value in _numbers(func, given):
        promotes = func._schema.name.split("::")[1].rstrip("_") in ("clamp", "clamp_min", "clamp_max")
        if promotes and _rank(value) > _rank_of_dtype(dtype):
            continue
        _refuse(
            overflows(value, dtype), func,
            f"value {value!r} of argument {name!r} cannot be converted to type {dtype} without overflow",
        )  # fmt: skip


def _rank(value: Any) -> int:
    return [bool, int, float, complex].index(type(value))


def _rank_of_dtype(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def overflows(value: Any, dtype: torch.dtype) -> bool:
    """Whether c10 refuses to convert a number: complex to real, or out of range; infinities and truncation pass.

    >>> overflows(300, torch.uint8), overflows(-1, torch.uint8), overflows(2.5, torch.int8), overflows(1j, torch.half)
    (True, False, False, True)
    """
    if isinstance(value, complex):
        if dtype.is_complex:
            return False
        if value.imag != 0:
            return dtype is not torch.bool
        value = value.real
    if dtype is torch.bool or dtype.is_complex or isinstance(value, bool):
        return False
    if dtype.is_floating_point:
        return math.isfinite(value) and abs(value) > torch.finfo(dtype).max
    if isinstance(value, float) and not math.isfinite(value):
        return math.isnan(value)
    info = torch.iinfo(dtype)
    lowest = -info.max if info.min == 0 else info.min
    return not lowest <= value <= info.max
