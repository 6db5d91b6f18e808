"""Operators that move elements or fill tensors with one value: exact on each part of a dual number alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fake.seam.dispatch import collectives
from fake.seam.pytree import tree_leaves, tree_map
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import LEVELS
from fxpasses.exact.rules.table import named, register_rules, rule

aten = torch.ops.aten

_ZERO_FILLING_OPS = {aten.tril, aten.triu, aten.diag_embed, aten.im2col}
"""Operators that put zeros next to the elements that they move."""
_RESHAPE_OPS = named("view _unsafe_view _reshape_alias reshape view_as reshape_as")


def _apply_to_parts(m: Arithmetic, op: Any, args: Any, kwargs: Any, reduce: bool) -> Any:
    """Apply the operator to the witnesses, and to the residues of each level.

    Args:
        m: the arithmetic.
        op: the operator.
        args: of the call.
        kwargs: of the call.
        reduce: whether elements are added up: then sums are taken modulo the prime, and non-finite elements
            get residue 0.
    """

    def is_dual(value: Any) -> bool:
        return isinstance(value, Dual)

    operands = [v for v in tree_leaves((args, kwargs), is_leaf=is_dual) if is_dual(v)]
    dtype = kwargs.get("dtype") or operands[0].dtype
    kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}

    def part(level: int) -> Any:
        def one(value: Any) -> Any:
            if not isinstance(value, Dual):
                return value
            return value.witness if level < 0 else value.residues[level]

        called = _call_with_float_fallback(
            op, tree_map(one, tuple(args), is_leaf=is_dual), {k: one(v) for k, v in kwargs.items()}
        )
        if not reduce or level < 0:
            return called
        return tree_map(lambda t: t % m.primes[level], called)

    witness = part(-1)
    residues = [part(level) for level in range(LEVELS)]

    def make_dual(w: Tensor, r: list[Tensor]) -> Dual:
        if not reduce:
            return Dual(w, r, dtype)
        finite = torch.isfinite(w)
        return Dual(w, [torch.where(finite, x, 0) for x in r], dtype)

    if isinstance(witness, Tensor):
        result = make_dual(witness, residues)
        if not reduce and op.overloadpacket not in _ZERO_FILLING_OPS:

            def apply_lazily(change: Callable[[Dual], Dual]) -> Callable[[], Any]:
                def one(value: Any) -> Any:
                    return change(value) if is_dual(value) else value

                return lambda: _apply_to_parts(
                    m,
                    op,
                    tree_map(one, tuple(args), is_leaf=is_dual),
                    tree_map(one, kwargs, is_leaf=is_dual),
                    reduce=False,
                )

            if any(operand.exponential is not None for operand in operands):
                result.exponential = apply_lazily(m.exp)
            if any(operand.square is not None for operand in operands):
                result.square = apply_lazily(m.squared)
        return result
    return type(witness)(make_dual(w, [r[i] for r in residues]) for i, w in enumerate(witness))


def _call_with_float_fallback(op: Any, args: Any, kwargs: Any) -> Any:
    try:
        return op(*args, **kwargs)
    except (
        NotImplementedError
    ):  # kernels for floats only; residues, and sums of 2**29 of them, are exact in float64
        in_float = tree_map(lambda t: t.double() if _is_integer(t) else t, (args[0], kwargs))
        return tree_map(lambda t: t.long(), op(in_float[0], *args[1:], **in_float[1]))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.int64


@rule(
    *named(
        "permute transpose t expand slice select unsqueeze squeeze cat stack clone alias detach contiguous split split_with_sizes unbind "
        "chunk flip roll repeat index index_select gather embedding unfold diagonal slice_scatter select_scatter diagonal_scatter "
        "tril triu lift_fresh_copy lift_fresh expand_as narrow flatten unflatten movedim diag_embed repeat_interleave "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle "
        "pixel_unshuffle upsample_nearest1d upsample_nearest2d masked_select take take_along_dim permute_copy split_copy view_copy "
        "squeeze_copy unsqueeze_copy slice_copy select_copy expand_copy transpose_copy t_copy detach_copy alias_copy index_copy "
        "swapaxes swapdims im2col channel_shuffle rot90 _to_dense"
    ),
    *named("wait_tensor", collectives),
    *(
        f"prims::{name}"
        for name in ("rev", "transpose", "squeeze", "slice", "broadcast_in_dim", "collapse", "cat", "clone")
    ),
)
def _move_elements(m: Arithmetic, op: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("memory_format", None)
    return _apply_to_parts(m, op, args, kwargs, reduce=False)


@rule(*_RESHAPE_OPS)
def _view(m: Arithmetic, op: Any, a: Dual, *args: Any, **kwargs: Any) -> Any:
    # The strides of parts differ from those in the graph: a reshape always works.
    if op._overloadname == "dtype":
        bits = (a.witness.to(a.dtype) if isinstance(a, Dual) else a).view(args[0])
        return m.dual(bits) if bits.is_floating_point() else bits
    size = args[0].shape if isinstance(args[0], (Dual, Tensor)) else args[0]
    return a.map(lambda t: t.reshape(size))


@rule(
    *named(
        "scatter_add embedding_dense_backward select_backward slice_backward unfold_backward diagonal_backward index_put "
        "_unsafe_index_put col2im upsample_nearest1d_backward upsample_nearest2d_backward trace masked_scatter"
    )
)
def _accumulate(m: Arithmetic, op: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and not dtype.is_floating_point:
        return op(args[0].witness, *args[1:], dtype=dtype)
    values = tuple(m.dual(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    return _apply_to_parts(
        m, op, values, kwargs if dtype is None else {**kwargs, "dtype": dtype}, reduce=True
    )


@rule(aten.scatter)
def _scatter(m: Arithmetic, op: Any, a: Any, dim: int, index: Tensor, source: Any, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    a = m.dual(a)
    if not isinstance(source, (Dual, Tensor)):
        source = m.full(index.shape, source, a.dtype or torch.float32)
    return _apply_to_parts(m, aten.scatter.src, (a, dim, index, m.dual(source)), {}, reduce=False)


@rule(aten.index_fill)
def _index_fill(m: Arithmetic, op: Any, a: Dual, dim: int, index: Tensor, value: Any) -> Dual:
    if not a.dim():
        return m.full((), value, a.dtype or torch.float32) if index.numel() else a
    mask = torch.zeros(a.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    size = [1] * a.dim()
    size[dim] = a.shape[dim]
    return m.select(mask.view(size), value, a).as_type(a.dtype or torch.float32)


@rule(aten.constant_pad_nd)
def _constant_pad(m: Arithmetic, op: Any, a: Dual, pad: Any, value: Any = 0) -> Dual:
    inside = aten.constant_pad_nd.default(torch.ones(a.shape, dtype=torch.bool), pad, False)
    return m.select(inside, a.map(lambda t: aten.constant_pad_nd.default(t, pad, 0)), value).as_type(
        a.dtype or torch.float32
    )


@rule(aten._to_copy, aten.to, *named("convert_element_type", torch.ops.prims))
def _cast(m: Arithmetic, op: Any, a: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    dtype = dtype or next((x for x in args if isinstance(x, torch.dtype)), None)
    if not isinstance(a, Dual):
        return m.dual(a, dtype) if dtype is not None and dtype.is_floating_point else NotImplemented
    if dtype is None:
        return a
    if (
        dtype.is_floating_point and dtype.itemsize == 1
    ):  # quantization with saturation is part of the function
        return m.from_witness(a.witness.float().to(dtype).double(), a).as_type(dtype)
    return a.as_type(dtype) if dtype.is_floating_point else a.witness.to(dtype)


register_rules(
    {
        aten.type_as: lambda m, op, a, other: _cast(m, op, a, dtype=other.dtype),
        aten.index_add: lambda m, op, a, dim, index, source, alpha=1: _apply_to_parts(
            m, op, (m.dual(a), dim, index, m.mul(source, alpha)), {}, reduce=True
        ),
    }
)


@rule(aten.copy)
def _copy(m: Arithmetic, op: Any, a: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(a, Dual):
        return m.dual(source).witness.to(a.dtype).expand(a.shape)
    return m.dual(source).map(lambda t: t.expand(a.shape)).as_type(a.dtype or torch.float32)


# Tensors of one value


register_rules(
    {
        aten.full_like: lambda m, op, a, value, dtype=None, **_: _full(m, a.shape, value, dtype or a.dtype),
        **dict.fromkeys(
            (aten.zeros_like, aten.empty_like),
            lambda m, op, a, dtype=None, **_: _full(m, a.shape, 0, dtype or a.dtype),
        ),
        aten.ones_like: lambda m, op, a, dtype=None, **_: _full(m, a.shape, 1, dtype or a.dtype),
        aten.new_full: lambda m, op, a, size, value, dtype=None, **_: _full(m, size, value, dtype or a.dtype),
        **dict.fromkeys(
            (aten.new_zeros, aten.new_empty),
            lambda m, op, a, size, dtype=None, **_: _full(m, size, 0, dtype or a.dtype),
        ),
        aten.new_ones: lambda m, op, a, size, dtype=None, **_: _full(m, size, 1, dtype or a.dtype),
        aten.full: lambda m, op, size, value, dtype=None, **_: _full(
            m, size, value, dtype or torch.full((), value).dtype
        ),
        aten.ones: lambda m, op, size, dtype=None, **_: _full(m, size, 1, dtype or torch.get_default_dtype()),
        aten.scalar_tensor: lambda m, op, value, dtype=None, **_: _full(
            m, (), value, dtype or torch.get_default_dtype()
        ),
    }
)


@rule(aten.new_empty_strided, aten.empty_strided, aten.empty, aten.zeros)
def _new_empty(m: Arithmetic, op: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    # Nothing may read uninitialized memory. Zeros make it the same in both graphs.
    like, size = (args[0], args[1]) if isinstance(args[0], (Dual, Tensor)) else (None, args[0])
    kind: Any = dtype or (like.dtype if like is not None else torch.get_default_dtype())
    return _full(m, size, 0, kind)


@rule(aten.fill)
def _fill(m: Arithmetic, op: Any, a: Any, value: Any) -> Any:
    if isinstance(value, (Dual, Tensor)) and value.dim() == 0 and a.dtype.is_floating_point:
        return m.full(a.shape, value, a.dtype)
    return _full(m, a.shape, value, a.dtype)


def _full(m: Arithmetic, size: Any, value: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return m.full(size, value, dtype)
    return torch.full(tuple(size), value, dtype=dtype)
