"""Copies of values in another layout: column-major, sliced, expanded, or channels-last."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["LAYOUTS", "OUT_KINDS", "make_out", "relayout"]

Strides = tuple[int, ...]


def _row_major(shape: tuple[int, ...]) -> Strides:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _column_major(t: torch.Tensor) -> tuple[Strides, int] | None:
    return (tuple(reversed(_row_major(tuple(reversed(t.shape))))), 0) if t.dim() >= 2 else None


def _sliced(t: torch.Tensor) -> tuple[Strides, int] | None:
    return (tuple(2 * s for s in _row_major(t.shape)), 3) if t.dim() >= 1 else None


def _expanded(t: torch.Tensor) -> tuple[Strides, int] | None:
    """Repeat the first row. Not for integers: they may be indices, which not every kernel checks."""
    if t.dim() < 1 or t.shape[0] < 2 or not (t.is_floating_point() or t.is_complex()):
        return None
    return (0, *_row_major(t.shape[1:])), 0


def _channels_last(t: torch.Tensor) -> tuple[Strides, int] | None:
    if t.dim() not in (4, 5):
        return None
    order = (0, *range(2, t.dim()), 1)
    physical = _row_major(tuple(t.shape[d] for d in order))
    return tuple(physical[order.index(d)] for d in range(t.dim())), 0


def _given(t: torch.Tensor) -> tuple[Strides, int] | None:
    return t.stride(), int(t.storage_offset())


#: Layouts by name. Each returns the strides and offset for a dense tensor, or ``None`` to keep its layout.
LAYOUTS: dict[str, Callable[[torch.Tensor], tuple[Strides, int] | None]] = {
    "given": _given,
    "column-major": _column_major,
    "sliced": _sliced,
    "expanded": _expanded,
    "channels-last": _channels_last,
}

#: Kinds of ``out=`` arguments: the right size, empty, a wrong size, the right size with odd strides.
OUT_KINDS = ("right", "empty", "wrong", "odd strides")


def relayout(tree: Any, layout: str, *, requires_grad: bool = True) -> tuple[Any, bool]:
    """Copy ``tree`` with every dense tensor in ``layout``. Also return whether any layout changed.

    A tensor that occurs twice is copied once. Modules are copied as they are. With ``requires_grad=False``,
    no copy requires a gradient.
    """
    place = LAYOUTS[layout]
    copies: dict[int, torch.Tensor] = {}
    changed = False

    def one(leaf: Any) -> Any:
        nonlocal changed
        if isinstance(leaf, torch.nn.Module):
            return copy.deepcopy(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            fresh = leaf.detach()
            target = place(leaf) if leaf.layout is torch.strided and not leaf.is_nested else None
            if target is None:
                fresh = fresh.clone()
            else:
                changed = changed or (target != (leaf.stride(), leaf.storage_offset()))
                fresh = _placed(fresh, *target)
            copies[id(leaf)] = fresh.requires_grad_(requires_grad and leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(one, tree), changed


def _placed(t: torch.Tensor, strides: Strides, offset: int) -> torch.Tensor:
    """Copy ``t`` to ``offset`` in a new storage, with ``strides``. Autograd does not see a view."""
    extent = 1 + offset + sum((size - 1) * step for size, step in zip(t.shape, strides, strict=True))
    storage = torch.zeros(
        max(extent, 1) if t.numel() else offset, dtype=t.dtype, device=t.device
    ).untyped_storage()
    placed = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, offset, t.shape, strides)
    if t.numel():
        overlapping = tuple(d for d, step in enumerate(strides) if step == 0 and t.shape[d] > 1)
        source, target = t, placed
        for d in overlapping:
            source, target = source.narrow(d, 0, 1), target.narrow(d, 0, 1)
        target.copy_(source)
    if t.is_conj():
        placed = placed.conj_physical_().conj()
    return placed


def make_out(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an ``out=`` argument of the given kind for a result of ``shape``."""
    match kind:
        case "right":
            return torch.zeros(shape, dtype=dtype, device=device)
        case "empty":
            return torch.zeros(0, dtype=dtype, device=device)
        case "wrong":
            return torch.zeros((*shape, 2), dtype=dtype, device=device)
        case "odd strides":
            # Swap the last two dimensions, with gaps. Batch dimensions must stay collapsible into one,
            # because eager's triangular kernels write out of bounds otherwise.
            strides = [2 * s for s in _row_major((*shape[:-2], *reversed(shape[-2:])))]
            strides[-2:] = reversed(strides[-2:])
            return _placed(torch.zeros(shape, dtype=dtype, device=device), tuple(strides), 1)
    raise ValueError(f"out kind {kind!r} is none of {OUT_KINDS}")
