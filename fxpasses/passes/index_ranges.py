"""Lookups of consecutive rows become slices, and their gradients padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.aliasing import AliasInfo
from fxpasses.contract import Contract, Pass
from fxpasses.passes._matching import (
    calls_before,
    constant_range,
    find_calls,
    is_all_true,
    is_zeros,
    shape_of,
)
from fxpasses.rewriting import replace, same_metadata, value_of
from fxpasses.sites import claim

__all__ = ["IndexRanges"]

aten = torch.ops.aten


@dataclass(frozen=True)
class IndexRanges(Pass):
    """Look up rows ``start .. start + n`` with a slice, and pad their gradient instead of scattering it.

    A model that embeds positions looks up ``arange(n)``: the forward copies rows one by one, and the
    backward adds them one by one to a table of zeros, with atomic additions where there are several threads.

    Before::

        rows = aten.embedding(table, prims.iota(512))          # table: f32[1024, 768]
        ...
        gradient = aten.index_put(aten.full([1024, 768], 0), [prims.iota(512)], grad, True)

    After::

        rows = aten.slice(table, 0, 0, 512)
        ...
        gradient = aten.constant_pad_nd(aten.add(grad, 0), [0, 0, 0, 512], 0.0)

    Bitwise: the addition of 0 makes of -0.0 what the addition to a table of zeros makes of it. Left alone:
    lookups that are returned or in memory that is written to (a slice is a view, a lookup is not).
    """

    name: ClassVar[str] = "index_ranges"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="bitwise")

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        changed = False
        for node in find_calls(gm.graph, aten.embedding.default, aten.index.Tensor):
            changed |= _slice_instead(gm, node, aliases)
        for node in find_calls(
            gm.graph, aten.index_put.default, aten._unsafe_masked_index_put_accumulate.default
        ):
            changed |= _pad_instead(gm, node)
        return changed


def _slice_instead(gm: fx.GraphModule, node: fx.Node, aliases: AliasInfo) -> bool:
    """Replace a lookup by a slice of the table, in the shape of the indices."""
    table, index = node.args[0], node.args[1]
    if isinstance(index, (list, tuple)):
        index = index[0] if len(index) == 1 else None
    start = _start_of_range(gm, table, index)
    if start is None or aliases.roots(node) & (aliases.output | aliases.mutated):
        return False
    assert isinstance(table, fx.Node)
    if aliases.roots(table) & aliases.mutated or not claim(node):
        return False
    call = calls_before(node)
    shape = shape_of(node)
    assert shape is not None
    rows = call(aten.slice.Tensor, table, 0, start, start + value_of(index).numel())
    if shape != shape_of(rows):
        rows = call(aten.view.default, rows, list(shape))
    if not same_metadata(value_of(rows), value_of(node)):  # a table that is not contiguous
        rows = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    replace(node, rows)
    return True


def _pad_instead(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Replace an accumulation of consecutive rows into zeros by padding."""
    if node.target is aten.index_put.default:
        table, indices, gradient = node.args[:3]
        if len(node.args) < 4 or node.args[3] is not True:
            return False
    else:
        table, mask, indices, gradient = node.args[:4]
        if not is_all_true(gm, mask):
            return False
    if not is_zeros(table) or len(indices) != 1 or not isinstance(gradient, fx.Node):  # type: ignore[arg-type]
        return False
    start = _start_of_range(gm, table, indices[0])  # type: ignore[index]
    shape, rows = shape_of(node), shape_of(indices[0])  # type: ignore[index]
    if start is None or shape is None or rows is None or shape_of(gradient) != (*rows, *shape[1:]):
        return False
    if not claim(node):
        return False
    call = calls_before(node)
    length = rows[-1]
    flat = call(aten.add.Tensor, gradient, 0)
    if len(rows) > 1:
        flat = call(aten.view.default, flat, [length, *shape[1:]])
    padding = [0, 0] * (len(shape) - 1) + [start, shape[0] - start - length]
    replace(node, call(aten.constant_pad_nd.default, flat, padding, 0.0))
    return True


def _start_of_range(gm: fx.GraphModule, table: object, index: object) -> int | None:
    """The first of the consecutive rows of ``table`` that ``index`` names, or None when it does not name such."""
    sizes = shape_of(table)
    rows = constant_range(gm, index) if isinstance(index, fx.Node) else None
    if not sizes or rows is None or rows.start < 0 or rows.stop > sizes[0]:
        return None
    return rows.start
