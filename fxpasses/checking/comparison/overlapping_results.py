"""Find which values of a graph share memory: exactly, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def overlapping(values: Sequence[Any], outputs: int) -> frozenset[tuple[int, int]]:
    """Return pairs of an output and a later value (an output or an input) whose memory overlaps.

    Args:
        values: outputs, then inputs.
        outputs: how many of them are outputs.
    """
    by_storage: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(position)
    return frozenset(
        (a, b)
        for group in by_storage.values()
        for i, a in enumerate(group)
        if a < outputs
        for b in group[i + 1 :]
        if _overlap(values[a], values[b])
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share an element (exactly, not just their ranges)."""
    if a.dtype.itemsize != b.dtype.itemsize:
        return True
    ranges = [(t.storage_offset(), t.storage_offset() + _extent(t)) for t in (a, b)]
    (start, stop), (other, end) = ranges
    if stop <= other or end <= start:
        return False
    low = min(start, other)
    marks = torch.zeros(max(stop, end) - low, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), start - low).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), other - low).any())


def _extent(t: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
