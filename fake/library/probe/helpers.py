"""The functions that rules are written with. A printed rule includes the source of those that it uses."""

from __future__ import annotations

import torch

__all__ = [
    "batched",
    "broadcast",
    "concatenated",
    "conv_size",
    "conv_transpose_size",
    "elementwise_strides",
    "floating",
    "given_shape",
    "integral_sum",
    "matmul_shape",
    "moved_strides",
    "ordered_strides",
    "padded",
    "pair",
    "promoted",
    "real",
    "reduced",
    "replaced",
    "row_major",
    "stacked",
    "suggested_strides",
    "to_complex",
    "transposed",
]


def broadcast(*shapes):
    """The shape that shapes broadcast to."""
    rank = max((len(shape) for shape in shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for index, size in enumerate(shape):
            place = rank - len(shape) + index
            if size != 1:
                if out[place] != 1 and out[place] != size:
                    raise ValueError("shapes do not broadcast")
                out[place] = size
    return tuple(out)


def reduced(shape, dim=None, keepdim=False):
    """A shape without some dimensions, or with size 1 there.

    Args:
        shape: the shape.
        dim: the dimensions; None or empty for all.
        keepdim: whether they stay, with size 1.
    """
    rank = len(shape)
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    gone = {d % rank if rank else 0 for d in dims}
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in dims):
        raise ValueError("no such dimension")
    if keepdim:
        return tuple(1 if i in gone else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in gone)


def replaced(shape, dim, size):
    """A shape with another size in one place. Args: the shape, the place and the size."""
    out = list(shape)
    out[dim] = size
    return tuple(out)


def concatenated(tensors, dim=0):
    """The shape of tensors joined along ``dim``; empty one-dimensional ones do not count."""
    shapes = [t.shape for t in tensors if tuple(t.shape) != (0,)] or [tensors[0].shape]
    return replaced(shapes[0], dim or 0, sum(s[dim or 0] for s in shapes))


def stacked(tensors, dim=0):
    """The shape of tensors joined along a new dimension."""
    shape = list(tensors[0].shape)
    dim = dim or 0
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, len(tensors))
    return tuple(shape)


def matmul_shape(left, right):
    """The shape of a matrix product with broadcast batch dimensions."""
    rows = () if len(left) == 1 else (left[-2],)
    columns = () if len(right) == 1 else (right[-1],)
    return broadcast(left[:-2], right[:-2]) + rows + columns


def transposed(shape, first, second):
    """A shape with two dimensions exchanged. Args: the shape and the dimensions."""
    out = list(shape)
    out[first], out[second] = out[second], out[first]
    return tuple(out)


def batched(shape, *tail):
    """``shape`` without its last two dimensions, then ``tail``."""
    return tuple(shape[:-2]) + tail


def given_shape(sizes, numel=None):
    """Sizes as an argument gives them; one -1 takes what ``numel`` leaves."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if -1 in sizes and numel is not None:
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        return tuple(numel // known if size == -1 else size for size in sizes)
    return sizes


def pair(value, index, default):
    """One number of several that an argument gives as one.

    Args:
        value: an int, or a list of ints.
        index: which of them.
        default: what None and an empty list stand for.
    """
    if value is None or value == ():
        return default
    if isinstance(value, int):
        return value
    return value[index] if len(value) > 1 else value[0]


def conv_size(size, kernel, stride=1, padding=0, dilation=1, ceil_mode=False):
    """How many windows fit. Args: as of a convolution along one dimension; ``size`` and ``kernel`` in elements."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    out = -(-room // stride) + 1
    return out - 1 if (out - 1) * stride >= size + padding else out


def conv_transpose_size(size, kernel, stride=1, padding=0, extra=0, dilation=1):
    """The size before a convolution. Args: as of :func:`conv_size`; ``size`` is what it gave, ``extra`` the output padding."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1


def padded(shape, pad):
    """A shape with ``pad`` (last dimension first, before and after) added."""
    out = list(shape)
    for index in range(len(pad) // 2):
        out[-1 - index] += pad[2 * index] + pad[2 * index + 1]
    return tuple(out)


def row_major(shape):
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def elementwise_strides(shape, *tensors):
    """The strides of a pointwise result: those of the inputs where they agree on an order without gaps."""
    metas = [torch.empty_strided(t.shape, t.stride(), device="meta", dtype=torch.float32) for t in tensors]
    out = metas[0]
    for meta in metas[1:]:
        out = torch.add(out, meta)
    if len(metas) == 1:
        out = torch.neg(out)
    return out.stride() if tuple(out.shape) == tuple(shape) else None


def suggested_strides(shape, tensor):
    """Channels-last strides where ``tensor`` has them (as ATen's suggest_memory_format decides), else contiguous."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    rank = len(sizes)
    if rank not in (4, 5) or len(shape) != rank or strides[1] == 0 or 0 in sizes:
        return row_major(shape)
    order = [1, *range(rank - 1, 1, -1), 0]
    least = 0
    for place in order:
        if strides[place] < least or (place == 0 and least == strides[1]):
            return row_major(shape)
        least = strides[place] * max(sizes[place], 1)
    out = [0] * rank
    step = 1
    for place in order:
        out[place] = step
        step *= max(shape[place], 1)
    return tuple(out)


def ordered_strides(shape, tensor):
    """Strides without gaps in the order of the dimensions of ``tensor``."""
    strides = tensor.stride()
    if len(strides) != len(shape):
        return None
    out = [0] * len(shape)
    step = 1
    for index in sorted(range(len(shape)), key=lambda i: (strides[i], -i)):
        out[index] = step
        step *= max(shape[index], 1)
    return tuple(out)


def moved_strides(shape, dim):
    """The strides of a tensor that was computed with ``dim`` last and then moved back."""
    rest = [i for i in range(len(shape)) if i != dim % len(shape)]
    order = [*rest, dim % len(shape)]
    inner = row_major([shape[i] for i in order])
    return tuple(inner[order.index(i)] for i in range(len(shape)))


def promoted(*values):
    """The dtype that tensors and numbers promote to."""
    operands = [
        torch.empty((0,) * v.dim(), dtype=v.dtype, device="meta") if hasattr(v, "dtype") else v
        for v in values
        if v is not None and not isinstance(v, (tuple, str))
    ]
    out = operands[0].dtype
    dims = operands[0].dim()
    for operand in operands[1:]:
        out = torch.result_type(torch.empty((0,) * dims, dtype=out, device="meta"), operand)
        dims = max(dims, operand.dim() if hasattr(operand, "dim") else 0)
    return out


def floating(dtype):
    """``dtype``, or the default dtype where it is integral."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def real(dtype):
    """The dtype of the real part."""
    return dtype.to_real()


def to_complex(dtype):
    """The complex dtype of the same precision."""
    return floating(dtype).to_complex()


def integral_sum(dtype):
    """What sums have: int64 where ``dtype`` is integral."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
