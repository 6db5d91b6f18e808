"""Concatenations of concatenations, and parts of them, are taken from their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.aliasing import AliasInfo
from fxpasses.contract import Contract, Pass
from fxpasses.passes._matching import calls_before, find_calls, is_call, shape_of, slice_bounds
from fxpasses.rewriting import replace, same_metadata, value_of
from fxpasses.sites import claim

__all__ = ["NestedConcatenations"]

aten = torch.ops.aten


@dataclass(frozen=True)
class NestedConcatenations(Pass):
    """Copy each value once where a concatenation grows step by step, and read slices from the value that they show.

    ``state = torch.cat([state, new])`` in a loop copies everything again at every step. In the backward pass the
    gradient is cut step by step.

    Before::

        first = aten.cat([a, b], 1)          # a: f32[8, 4], b: f32[8, 2]
        second = aten.cat([first, c], 1)
        part = aten.slice(second, 1, 0, 4)

    After::

        second = aten.cat([a, b, c], 1)
        part = a

    Also slices of slices. Bitwise. Left alone: values that are returned or written to, where
    the one would become a view of the other.
    """

    name: ClassVar[str] = "nested_concatenations"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="bitwise")

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        changed = False
        for node in find_calls(gm.graph, aten.cat.default):
            changed |= _flatten(node)
        for node in find_calls(gm.graph, aten.slice.Tensor):
            if aliases.roots(node) & (aliases.output | aliases.mutated):
                continue
            changed |= _slice_of_slice(node) or _slice_of_part(node, aliases)
        return changed


def _dimension(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return dim % value_of(node).dim()  # type: ignore[operator]


def _parts(node: fx.Node) -> list[fx.Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _flatten(node: fx.Node) -> bool:
    """Concatenate the parts of the parts, where a part is a concatenation along the same dimension for nobody else."""
    dim = _dimension(node)
    parts: list[fx.Node] = []
    for part in _parts(node):
        inner = (
            is_call(part, aten.cat.default)
            and _dimension(part) == dim
            and value_of(part).dim() == value_of(node).dim()
            and value_of(part).dtype is value_of(node).dtype
            and all(value_of(p).dim() == value_of(node).dim() for p in _parts(part))
            # Cheaper only if the inner one is not needed anyway.
            and all(_may_skip(user, part, dim) for user in part.users)
        )
        parts.extend(_parts(part) if inner else [part])
    if len(parts) == len(_parts(node)) or not claim(node):
        return False
    new = calls_before(node, like=node)(aten.cat.default, parts, dim)
    if not same_metadata(value_of(new), value_of(node)):
        node.graph.erase_node(new)
        return False
    replace(node, new)
    return True


def _may_skip(user: fx.Node, cat: fx.Node, dim: int) -> bool:
    """Whether ``user`` will not need ``cat`` itself: a concatenation around it, or a slice of one of its parts."""
    if is_call(user, aten.cat.default):
        return _dimension(user) == dim
    return is_call(user, aten.slice.Tensor) and _part_of(user) is not None


def _part_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """The part of a concatenation that a slice lies in, and the bounds within it, or None."""
    cat, bounds = node.args[0], slice_bounds(node)
    if not is_call(cat, aten.cat.default) or bounds is None or bounds[0] != _dimension(cat):
        return None
    dim, start, end = bounds
    position = 0
    for part in _parts(cat):
        shape = shape_of(part)
        if (
            shape is None
            or len(shape) != value_of(cat).dim()
            or value_of(part).dtype is not value_of(cat).dtype
        ):
            return None
        if position <= start and end <= position + shape[dim]:
            return part, start - position, end - position
        position += shape[dim]
    return None


def _slice_of_part(node: fx.Node, aliases: AliasInfo) -> bool:
    found = _part_of(node)
    if found is None or aliases.roots(found[0]) & aliases.mutated:
        return False
    part, start, end = found
    cat = node.args[0]
    assert isinstance(cat, fx.Node)
    # Between row-major values only the distance of the rows changes: nothing that is computed from the slice
    # gets other strides. What reads memory by strides would.
    row_major = shape_of(cat) is not None and value_of(part).is_contiguous() and value_of(cat).is_contiguous()
    if not row_major or any(is_call(user, aten.as_strided.default) for user in node.users) or not claim(node):
        return False
    dim = _dimension(cat)
    whole = (start, end) == (0, value_of(part).shape[dim])
    replace(node, part if whole else calls_before(node)(aten.slice.Tensor, part, dim, start, end))
    return True


def _slice_of_slice(node: fx.Node) -> bool:
    inner, outer_bounds = node.args[0], slice_bounds(node)
    if not is_call(inner, aten.slice.Tensor) or outer_bounds is None:
        return False
    inner_bounds = slice_bounds(inner)
    if inner_bounds is None or inner_bounds[0] != outer_bounds[0] or not claim(node):
        return False
    dim, start, end = outer_bounds
    shift = inner_bounds[1]
    node.args = (inner.args[0], dim, start + shift, end + shift)
    return True
