"""Checks of operators that take indices, slices or strides."""

from __future__ import annotations

import math
from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, extent, refuse, wrapped_dim
from fake.kernels.outputs import is_symbolic


@check_for("as_strided", "as_strided_copy", "as_strided_scatter")
def check_view_fits_storage(func: OpOverload, bound: dict[str, Any]) -> None:
    """Sizes, strides and offset must stay inside the storage."""
    self, sizes, strides = bound["self"], bound["size"], bound["stride"]
    offset = self.storage_offset() if bound["storage_offset"] is None else bound["storage_offset"]
    if len(sizes) != len(strides):
        return
    needed = extent(sizes, strides, offset) * self.dtype.itemsize
    held = self.untyped_storage().nbytes()
    if "scatter" in func.name():  # copies the storage, or only elements if some share memory
        if any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride(), strict=True)):
            held = self.numel() * self.dtype.itemsize
        refuse(
            0 not in sizes and any(step == 0 and size > 1 for size, step in zip(sizes, strides, strict=True)), func,
            "more than one element of the written-to tensor refers to a single memory location (argument 'stride' is 0)",
        )  # fmt: skip
    refuse(
        needed > held, func,
        f"sizes {list(sizes)}, strides {list(strides)}, storage offset {offset}, and itemsize {self.dtype.itemsize} "
        f"requiring a storage size of {needed} are out of bounds for storage of size {held}",
    )  # fmt: skip


@check_for("empty_strided", "new_empty_strided")
def check_strides_nonnegative(func: OpOverload, bound: dict[str, Any]) -> None:
    """A stride must not be negative if its dimension has more than one element, in a tensor with elements."""
    sizes, strides = bound["size"], bound["stride"]
    refuse(
        any(step < 0 and size > 1 for size, step in zip(sizes, strides, strict=False)) and 0 not in sizes, func,
        f"Storage size calculation overflowed with sizes={list(sizes)} and strides={list(strides)}: argument 'stride' "
        "must not be negative",
    )  # fmt: skip


@check_for("gather", "scatter", "scatter_add", "scatter_reduce")
def check_indexed_dim_nonempty(func: OpOverload, bound: dict[str, Any]) -> None:
    """Any index into an empty dimension is out of bounds."""
    self, index = bound["self"], bound["index"]
    dim = wrapped_dim(func, bound["dim"], self.dim())
    size = self.shape[dim] if self.dim() else 1
    refuse(
        size == 0 and index.numel() > 0, func,
        f"argument 'index' has elements and is out of bounds for dimension {dim} with size 0",
    )  # fmt: skip


@check_for("index_copy", "index_fill")
def check_written_dim_nonempty(func: OpOverload, bound: dict[str, Any]) -> None:
    """An empty dimension cannot receive elements."""
    self, index = bound["self"], bound["index"]
    dim = wrapped_dim(func, bound["dim"], self.dim())
    others = (size for axis, size in enumerate(self.shape) if axis != dim)
    refuse(
        self.dim() > 0 and self.shape[dim] == 0 and index.numel() > 0 and 0 not in others, func,
        f"argument 'index' has elements and is out of bounds for dimension {dim} with size 0",
    )  # fmt: skip


@check_for("index_reduce")
def check_index_reduce(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be one index per slice of the source, slices as in ``self``, and a slice to reduce into."""
    self, index, source = bound["self"], bound["index"], bound["source"]
    dim = wrapped_dim(func, bound["dim"], self.dim())
    refuse(index.dim() > 1, func, f"Index is supposed to be a vector, but got dim: {index.dim()}", IndexError)
    shapes = [[size for axis, size in enumerate(t.shape) if axis != dim] for t in (self, source)]
    refuse(
        self.dim() != source.dim() or shapes[0] != shapes[1], func,
        f"source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
        f"{list(self.shape)} source.shape = {list(source.shape)}",
    )  # fmt: skip
    refuse(
        source.dim() == 0 and index.numel() != 1, func,
        "Dimension specified as 0 but tensor has no dimensions (argument 'index' has more than one element)", IndexError,
    )  # fmt: skip
    refuse(
        source.dim() > 0 and index.numel() != source.shape[dim], func,
        f"Number of indices ({index.numel()}) should be equal to source.size(dim): ({source.shape[dim] if source.dim() else 1})",
    )  # fmt: skip
    refuse(
        self.dim() > 0 and self.shape[dim] == 0 and index.numel() > 0, func,
        f"index is out of range for tensor of size {list(self.shape)} at dimension {dim}", IndexError,
    )  # fmt: skip


@check_for("index_select")
def check_index_select(func: OpOverload, bound: dict[str, Any]) -> None:
    """The index must be a vector. Only one element can be selected from a scalar."""
    self, index = bound["self"], bound["index"]
    dim = wrapped_dim(func, bound["dim"], self.dim())
    refuse(index.dim() > 1, func, "Index is supposed to be a vector", IndexError)
    refuse(
        self.dim() == 0 and index.numel() != 1, func,
        f"Index to scalar can have only 1 value, got {index.numel()} value(s)",
    )  # fmt: skip
    refuse(
        self.dim() > 0 and self.shape[dim] == 0 and index.numel() > 0, func,
        f"self indexing axis dim {dim} should be positive",
    )  # fmt: skip


@check_for("embedding")
def check_embedding(func: OpOverload, bound: dict[str, Any]) -> None:
    """The weight must be a matrix, with rows if there are indices to look up."""
    weight, indices = bound["weight"], bound["indices"]
    refuse(weight.dim() != 2, func, f"'weight' must be 2-D, got {weight.dim()}-D")
    refuse(weight.shape[0] == 0 and indices.numel() > 0, func, "'weight' has no rows to look up")


@check_for("put")
def check_put(func: OpOverload, bound: dict[str, Any]) -> None:
    """There must be as many values as indices, and a tensor with elements to put them in."""
    self, index, source = bound["self"], bound["index"], bound["source"]
    refuse(
        index.numel() != source.numel(), func,
        f"Expected source and index to have the same number of elements, but got source.numel() = {source.numel()}, "
        f"index.numel() = {index.numel()}", IndexError,
    )  # fmt: skip
    refuse(
        self.numel() == 0 and index.numel() > 0,
        func,
        "Tried to put elements into an empty tensor",
        IndexError,
    )


@check_for("take")
def check_take(func: OpOverload, bound: dict[str, Any]) -> None:
    """No element can be taken from an empty tensor."""
    refuse(
        bound["self"].numel() == 0 and bound["index"].numel() > 0,
        func,
        "tried to take from an empty tensor",
        IndexError,
    )


@check_for("slice_scatter")
def check_slice_scatter(func: OpOverload, bound: dict[str, Any]) -> None:
    """The source must have the shape of the slice."""
    self, src, step = bound["self"], bound["src"], bound["step"]
    refuse(step <= 0, func, "slice step must be positive")
    dim = wrapped_dim(func, bound["dim"], self.dim())
    shape = list(self.shape)
    if is_symbolic((bound["start"], bound["end"], shape[dim]), {}):  # as for the view itself
        shape[dim] = torch.ops.aten.slice.Tensor(self, dim, bound["start"], bound["end"], step).shape[dim]
    else:
        shape[dim] = len(range(*slice(bound["start"], bound["end"], step).indices(shape[dim])))
    refuse(
        list(src.shape) != shape, func,
        f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = {shape}",
    )  # fmt: skip


@check_for("select", "narrow", "select_copy")
def check_selected_dim(func: OpOverload, bound: dict[str, Any]) -> None:
    """The dimension must exist."""
    if bound["self"].dim():
        wrapped_dim(func, bound["dim"], bound["self"].dim())


@check_for("select_scatter", "diagonal_scatter")
def check_view_scatter(func: OpOverload, bound: dict[str, Any]) -> None:
    """The source must have the shape of the view that it replaces."""
    self, src = bound["self"], bound["src"]
    shape = list(self.shape)
    if "index" in bound:
        dim = wrapped_dim(func, bound["dim"], self.dim())
        index, size = bound["index"], shape.pop(dim)
        refuse(
            not -size <= index < size,
            func,
            f"index {index} out of range for tensor of size {list(self.shape)} at dimension {dim}",
            IndexError,
        )
    else:
        rows, columns = (wrapped_dim(func, bound[name], self.dim()) for name in ("dim1", "dim2"))
        height, width, offset = shape[rows], shape[columns], bound["offset"]
        shape = [size for dim, size in enumerate(shape) if dim not in (rows, columns)]
        shape.append(torch.sym_max(torch.sym_min(height + min(offset, 0), width - max(offset, 0)), 0))
    refuse(
        list(src.shape) != shape, func,
        f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = {list(shape)}",
    )  # fmt: skip


def _indexed_shape(shape: Any, indices: Any) -> list[int] | None:
    """Return the shape of ``self[indices]``, or ``None`` if a mask makes it data-dependent."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if not dims or len(indices) > len(shape):
        return None
    common = list(torch.broadcast_shapes(*(indices[dim].shape for dim in dims)))
    kept = [size for dim, size in enumerate(shape) if dim not in dims]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    front = sum(dim < dims[0] for dim in range(len(shape)) if dim not in dims) if adjacent else 0
    return [*kept[:front], *common, *kept[front:]]


@check_for("index", "index_put", "_index_put_impl", "_unsafe_index_put")
def check_indices(func: OpOverload, bound: dict[str, Any]) -> None:
    """Indices must broadcast, masks must match what they mask, and empty dimensions cannot be indexed."""
    self, indices = bound["self"], bound["indices"]
    used = sum(i.dim() if i is not None and i.dtype in (torch.bool, torch.uint8) else 1 for i in indices)
    refuse(
        used > self.dim(),
        func,
        f"too many indices for tensor of dimension {self.dim()} (got {used})",
        IndexError,
    )
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            for own, size in enumerate(index.shape):
                refuse(
                    dim + own >= self.dim() or self.shape[dim + own] != size, func,
                    f"The shape of the mask {list(index.shape)} at index {own} does not match the shape of the indexed "
                    f"tensor {list(self.shape)} at index {dim + own}", IndexError,
                )  # fmt: skip
            dim += index.dim()
        else:
            dim += 1
    shapes = [i.shape for i in indices if i is not None and i.dtype not in (torch.bool, torch.uint8)]
    try:
        common = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise IndexError(
            f"{func}: shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{[list(s) for s in shapes]}"
        ) from None
    for dim, index in enumerate(indices):
        empty = index is not None and dim < self.dim() and self.shape[dim] == 0
        refuse(
            empty and _indexed_shape(self.shape, indices) is not None and math.prod(common) > 0, func,
            f"index is out of bounds for dimension {dim} with size 0", IndexError,
        )  # fmt: skip


@check_for("index_put", "_index_put_impl", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")
def check_index_put_values(func: OpOverload, bound: dict[str, Any]) -> None:
    """The values must broadcast to the shape of the indexing result."""
    shape = _indexed_shape(bound["self"].shape, bound["indices"])
    values = bound["values"].shape
    if "mask" in bound:
        if bound["self"].numel() == 0:
            return
        values = torch.broadcast_shapes(values, bound["mask"].shape)
    if shape is None:
        return
    fits = len(values) <= len(shape) and all(
        a in (b, 1) for a, b in zip(reversed(values), reversed(shape), strict=False)
    )
    refuse(
        not fits, func,
        f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to indexing result of shape {shape}",
    )  # fmt: skip
