"""Pooling, and sums and extremes over bags and segments of elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

aten, prims = torch.ops.aten, torch.ops.prims

_MAX_FACTORS = 512
"""Of a row, which are multiplied one after the other."""


def _gather_spatial(a: Dual, indices: Tensor, spatial: int) -> Dual:
    """The elements at these indices into the last ``spatial`` dimensions, flattened."""
    at = indices.flatten(-spatial)
    return a.map(lambda t: t.flatten(-spatial).gather(-1, at).view(indices.shape))


@rule(*named("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"))
def _max_pool(m: Arithmetic, op: Any, a: Dual, *how: Any) -> Any:
    witness, indices = op(a.witness, *how)
    spatial = 3 if "3d" in op._schema.name else 2
    return m.assemble(witness, _gather_spatial(a, indices, spatial).residues, dtype=a.dtype), indices


@rule("prims::_low_memory_max_pool_with_offsets")
def _max_pool_with_offsets(
    m: Arithmetic, op: Any, a: Dual, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Any:
    witness, offsets = op(a.witness, kernel, stride, padding, dilation, ceil)
    size = a.shape[-len(kernel) :]
    indices = prims._low_memory_max_pool_offsets_to_indices.default(
        offsets, kernel, size, stride, padding, dilation
    )
    return m.assemble(witness, _gather_spatial(a, indices, len(kernel)).residues, dtype=a.dtype), offsets


@rule(
    *named(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward"
    )
)
def _max_pool_backward(m: Arithmetic, op: Any, grad: Dual, a: Any, *how: Any) -> Dual:
    spatial = 3 if "3d" in op._schema.name else 2
    at = how[-1].flatten(-spatial)
    size = (*a.shape[:-spatial], math.prod(a.shape[-spatial:]))

    def scattered(t: Tensor) -> Tensor:
        return torch.zeros(size, dtype=t.dtype).scatter_add(-1, at, t.flatten(-spatial)).view(a.shape)

    return m.linear(scattered, grad)


@rule(*named("avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward"))
def _avg_pool(m: Arithmetic, op: Any, a: Dual, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {x.name: x.default_value for x in op._schema.arguments if x.default_value is not None}
    given |= dict(zip(names[1:], args, strict=False)) | kwargs
    kernel = given["kernel_size"]
    if given.get("divisor_override"):
        denominator = int(given["divisor_override"])
    elif given.get("ceil_mode") or not given.get("count_include_pad", True):
        denominator = math.prod(math.lcm(*range(1, k + 1)) for k in kernel)
    else:
        denominator = math.prod(kernel)
    rest = [a.witness.new_zeros(x.shape) if isinstance(x, (Dual, Tensor)) else x for x in args]
    return m.rational(lambda t: op(t, *rest, **kwargs), a, denominator)


@rule(
    *named(
        "adaptive_avg_pool1d _adaptive_avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool3d "
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
    )
)
def _adaptive_avg_pool(m: Arithmetic, op: Any, a: Dual, other: Any) -> Any:
    backward = isinstance(other, (Dual, Tensor))
    rest = a.witness.new_zeros(other.shape) if backward else other
    spatial = 3 if "3d" in op._schema.name else 1 if "1d" in op._schema.name else 2
    inner = list((other if backward else a).shape[-spatial:])
    outer = list(a.shape[-spatial:]) if backward else list(other)
    sizes = ({-(-(i + 1) * n // k) - i * n // k for i in range(k)} for n, k in zip(inner, outer, strict=True))
    return m.rational(lambda t: op(t, rest), a, math.prod(math.lcm(*s) for s in sizes))


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def _embedding_bag(
    m: Arithmetic,
    op: Any,
    weight: Dual,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    factors = per_sample_weights.witness if per_sample_weights is not None else None
    witness, *rest = op(
        weight.witness, indices, offsets, False, mode, False, factors, include_last_offset, padding_idx
    )
    if mode == 2:
        found = weight.map(lambda t: t.gather(0, rest[2].clamp(min=0)))
        found = m.select((rest[1] > 0).unsqueeze(-1), found, 0)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        bags = torch.searchsorted(starts, torch.arange(len(indices)).to(starts.dtype), right=True) - 1
        rows = weight.map(lambda t: t[indices])
        if per_sample_weights is not None:
            rows = m.mul(rows, per_sample_weights.map(lambda t: t.unsqueeze(-1)))
        rows = m.select((indices != padding_idx).unsqueeze(-1), rows, 0)
        size = (len(starts), rows.shape[1])
        found = m.linear(lambda t: torch.zeros(size, dtype=t.dtype).index_add(0, bags, t), rows)
        if mode == 1:
            counts = torch.zeros(len(starts), dtype=torch.int64).index_add(
                0, bags, (indices != padding_idx).long()
            )
            found = m.div(found, counts.clamp(min=1).unsqueeze(-1))
    return m.assemble(witness, found.residues, dtype=weight.dtype), *rest


@rule(aten._embedding_bag_backward)
def _embedding_bag_backward(
    m: Arithmetic,
    op: Any,
    grad: Dual,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    largest: Tensor,
    rows: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    if scale_grad_by_freq or sparse:
        return NotImplemented
    size = (rows, grad.shape[1])
    if mode == 2:
        grad = m.select((sizes > 0).unsqueeze(-1), grad, 0)
        return m.linear(
            lambda t: torch.zeros(size, dtype=t.dtype).scatter_add(0, largest.clamp(min=0), t), grad
        )
    if len(bags) != len(indices):  # some kernels do not return bags: they begin at their offsets
        bags = torch.searchsorted(offsets, torch.arange(len(indices)).to(offsets.dtype), right=True) - 1
    if mode == 1:
        grad = m.div(grad, sizes.clamp(min=1).unsqueeze(-1))
    each = grad.map(lambda t: t[bags])
    if per_sample_weights is not None:
        each = m.mul(each, per_sample_weights.map(lambda t: t.unsqueeze(-1)))
    each = m.select((indices != padding_idx).unsqueeze(-1), each, 0).as_type(grad.dtype or torch.float32)
    return m.linear(lambda t: torch.zeros(size, dtype=t.dtype).index_add(0, indices, t), each)


@rule(aten.scatter_reduce)
def _scatter_reduce(
    m: Arithmetic,
    op: Any,
    a: Dual,
    dim: int,
    index: Tensor,
    source: Dual,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    a, source = m.dual(a), m.dual(source)
    if reduce not in ("sum", "mean", "amax", "amin", "prod") or not a.dim():
        return NotImplemented
    source = source.map(lambda t: t[tuple(slice(n) for n in index.shape)])
    hit = torch.zeros(a.shape, dtype=torch.bool).scatter(dim, index, True)
    if reduce == "prod":
        return _scatter_products(m, a if include_self else m.select(hit, 1, a), dim, index, source)
    start = a if include_self else m.select(hit, 0, a)
    if reduce in ("amax", "amin"):
        witness = op(a.witness, dim, index, source.witness, reduce, include_self=include_self)
        is_chosen = source.witness == witness.gather(dim, index)
        places = torch.full(a.shape, -1).scatter_reduce(
            dim, index, torch.where(is_chosen, _flat_indices(index), -1), "amax"
        )
        taken = source.map(lambda t: t.flatten()[places.clamp(min=0)])
        return m.assemble(witness, m.select(places >= 0, taken, a).residues, dtype=a.dtype)
    total = m.linear(lambda t, s: t.scatter_add(dim, index, s), start, source)
    if reduce == "mean":
        counts = torch.zeros(a.shape, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
        total = m.div(total, counts + 1 if include_self else counts.clamp(min=1))
    return total.as_type(a.dtype or torch.float32)


def _scatter_products(m: Arithmetic, a: Dual, dim: int, index: Tensor, source: Dual) -> Any:
    """Multiply scattered factors into a tensor: one of each row at a time, so that no place occurs twice."""
    if index.shape[dim] > _MAX_FACTORS:
        return NotImplemented
    for i in range(index.shape[dim]):
        at = index.narrow(dim, i, 1)
        factor = source.map(lambda t, i=i: t.narrow(dim, i, 1))  # type: ignore[misc]
        product = m.mul(a.map(lambda t, at=at: t.gather(dim, at)), factor)  # type: ignore[misc]
        a = Dual(
            a.witness.scatter(dim, at, product.witness),
            [r.scatter(dim, at, p) for r, p in zip(a.residues, product.residues, strict=True)],
            a.dtype,
        )
    return a


@rule(*named("histc"))
def _histogram(m: Arithmetic, op: Any, a: Dual, *bins: Any) -> Dual:
    return m.from_witness(op(a.witness, *bins), a.witness.new_zeros(())).as_type(a.dtype or torch.float32)


def _flat_indices(like: Tensor) -> Tensor:
    return torch.arange(like.numel()).view(like.shape)


def _segment_lengths(how: dict[str, Any]) -> Tensor | None:
    """The number of rows in each segment; ``None`` if segments are not along the first dimension."""
    lengths, offsets = how.get("lengths"), how.get("offsets")
    if lengths is None and offsets is not None:
        lengths = offsets.diff()
    if lengths is None or lengths.dim() != 1 or how.get("initial") is not None or how.get("axis", 0) != 0:
        return None
    return lengths  # type: ignore[no-any-return]


@rule(aten.segment_reduce)
def _segment_reduce(m: Arithmetic, op: Any, a: Dual, reduce: str, **how: Any) -> Any:
    lengths = _segment_lengths(how)
    if lengths is None or reduce == "prod":
        return NotImplemented
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    size = (len(lengths), *a.shape[1:])
    if len(bags) != len(a.witness):
        raise ValueError("lengths of segments that do not add up to the rows")
    if reduce in ("max", "min"):
        places = bags.view(-1, *[1] * (a.dim() - 1)).expand(a.shape)
        start = m.full(size, -math.inf if reduce == "max" else math.inf, a.dtype or torch.float32)
        return _scatter_reduce(m, aten.scatter_reduce.two, start, 0, places, a, f"a{reduce}")
    total = m.linear(lambda t: torch.zeros(size, dtype=t.dtype).index_add(0, bags, t), a)
    if reduce == "sum":
        return total
    return m.div(total, lengths.view(-1, *[1] * (a.dim() - 1)))


@rule(*named("_segment_reduce_backward"))
def _segment_reduce_backward(
    m: Arithmetic, op: Any, grad: Dual, output: Dual, a: Dual, reduce: str, **how: Any
) -> Any:
    lengths = _segment_lengths(how)
    if lengths is None or reduce == "prod":
        return NotImplemented
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if len(bags) != len(a.witness):
        raise ValueError("lengths of segments that do not add up to the rows")
    if reduce == "mean":
        grad = m.div(grad, lengths.clamp(min=1).view(-1, *[1] * (a.dim() - 1)))
    each = grad.map(lambda t: t[bags])
    if reduce in ("max", "min"):  # ties share it
        is_chosen = torch.eq(*m.comparable_witnesses(a, output.map(lambda t: t[bags])))
        chosen = torch.zeros(grad.shape, dtype=torch.int64).index_add(0, bags, is_chosen.long())
        each = m.select(is_chosen, m.div(each, chosen.clamp(min=1)[bags]), 0)
    return each.as_type(a.dtype or torch.float32)
