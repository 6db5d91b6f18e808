"""Replace matmuls with one-hot rows by lookups, and their gradients by scatters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    RESHAPES,
    calls_before,
    constant_range,
    find_calls,
    is_call,
    shape_of,
    untransposed,
)

aten, prims = torch.ops.aten, torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True)
class ReplaceOneHotMatmul(Pass):
    """Replace a matmul with one-hot rows by a lookup of rows.

    ``one_hot(index, classes).float() @ weight`` reads the whole weight for every row, and multiplies all but
    one row of it by zero. Its gradient does the reverse.

    Before::

        hot = prims.convert_element_type(aten.eq(aten.unsqueeze(index, -1), prims.iota(1000)), f32)
        out = aten.mm(hot, weight)                                # weight: f32[1000, 64]
        ...
        gradient = aten.mm(aten.permute(hot, [1, 0]), grad)

    After::

        valid = (index >= 0) & (index < 1000)
        row = aten.where(valid, index, 0)
        out = aten.where(valid[:, None], aten.embedding(weight, row), 0)
        ...
        gradient = aten.index_put(aten.full([1000, 64], 0), [row], aten.where(valid[:, None], grad, 0), True)

    An index out of range gives a row of zeros, as before. Equal up to rounding if weights and gradients are
    finite: infinity times 0 is NaN, which a lookup does not compute.
    """

    name: ClassVar[str] = "replace_one_hot_matmul"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for node in find_calls(gm.graph, aten.mm.default, aten.addmm.default):
            bias, (left, right) = None, node.args[-2:]
            if node.target is aten.addmm.default:
                bias = node.args[0]
                if node.kwargs:
                    continue
            left_hot = _one_hot(gm, left)
            if left_hot is not None:
                changed |= _look_up(node, bias, left_hot, right)  # type: ignore[arg-type]
                continue
            source = untransposed(left) if isinstance(left, fx.Node) else None
            hot = _one_hot(gm, source)
            if hot is not None and bias is None:
                changed |= _scatter(node, hot, right)  # type: ignore[arg-type]
        return changed


def _one_hot(gm: fx.GraphModule, node: object) -> tuple[fx.Node, int] | None:
    """Return the indices and the number of classes of one-hot rows ``[n, classes]``, or None."""
    shape = shape_of(node)
    if shape is None or len(shape) != 2:
        return None
    while is_call(node, *_CASTS, *RESHAPES):
        if (shape_of(node) or (0,))[-1] != shape[-1]:
            return None
        node = node.args[0]
    if not is_call(node, aten.eq.Tensor):
        return None
    for unsqueezed, classes in (node.args, tuple(reversed(node.args))):
        if not is_call(unsqueezed, aten.unsqueeze.default) or not isinstance(classes, fx.Node):
            continue
        index = unsqueezed.args[0]
        counted = constant_range(gm, classes)
        last = unsqueezed.args[1] in (-1, value_of(unsqueezed).dim() - 1)
        if (
            counted != range(shape[-1])
            or not last
            or not isinstance(index, fx.Node)
            or value_of(index).dtype is torch.bool
        ):
            continue
        if not value_of(index).is_floating_point() and shape_of(node) is not None:
            return index, shape[-1]
    return None


def _rows(call: Callable[..., fx.Node], index: fx.Node, classes: int) -> tuple[fx.Node, fx.Node]:
    """Return ``[n]`` indices clamped into range, and whether they were in range as ``[n, 1]``."""
    count = math.prod(shape_of(index) or ())
    flat = call(
        aten.view.default, call(aten.clone.default, index, memory_format=torch.contiguous_format), [count]
    )
    valid = call(aten.bitwise_and.Tensor, call(aten.ge.Scalar, flat, 0), call(aten.lt.Scalar, flat, classes))
    zero = call(aten.full.default, [], 0, dtype=value_of(index).dtype, device=value_of(index).device)
    row = call(aten.where.self, valid, flat, zero)
    if value_of(row).dtype is not torch.int64:
        row = call(prims.convert_element_type.default, row, torch.int64)
    return row, call(aten.unsqueeze.default, valid, 1)


def _zero(call: Callable[..., fx.Node], like: fx.Node) -> fx.Node:
    value = value_of(like)
    return call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)


def _look_up(matmul: fx.Node, bias: object, hot: tuple[fx.Node, int], weight: fx.Node) -> bool:
    if not claim(matmul):
        return False
    call = calls_before(matmul)
    row, valid = _rows(call, *hot)
    found = call(aten.where.self, valid, call(aten.embedding.default, weight, row), _zero(call, weight))
    if bias is not None:
        found = call(aten.add.Tensor, found, bias)
    replace(matmul, found)
    return True


def _scatter(matmul: fx.Node, hot: tuple[fx.Node, int], gradient: fx.Node) -> bool:
    if not value_of(gradient).is_floating_point() or shape_of(matmul) is None or not claim(matmul):
        return False
    call = calls_before(matmul)
    row, valid = _rows(call, *hot)
    kept = call(aten.where.self, valid, gradient, _zero(call, gradient))
    value = value_of(matmul)
    zeros = call(aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device)
    replace(matmul, call(aten.index_put.default, zeros, [row], kept, True))
    return True
