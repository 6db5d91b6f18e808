"""Sums in another order: what a rewrite may do that is right, and what one element may lose by it.

An operator that sums many products rounds once, at the end, or nearly so. A rewrite that makes the sum in parts rounds each part, and
a part may be many times as large as the sum: a sum that is exact by luck, or zero, is off by half a unit in the last place of its largest
part (N. J. Higham, "The accuracy of floating point summation", 1993: the error of any order is bounded by the partial sums that it makes).
So the size of the parts decides what rounding may do to one element, and it is measured: the sum is made in a few parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses._torch import OpOverload

__all__ = ["largest_part"]

aten = torch.ops.aten
_PARTS = 8
"""In how many parts a sum is made: what lies in front of each seam, and behind it, is looked at."""


def largest_part(target: Any, args: Sequence[Any], kwargs: Any) -> Tensor | None:
    """The largest partial sum, in float64, behind each element of a sum or a product; ``None`` for other operators.

    Args:
        target: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    >>> a, b = torch.tensor([[8.0, -7.0]]), torch.tensor([[1.0], [1.0]])
    >>> largest_part(torch.ops.aten.mm.default, (a, b), {})
    tensor([[8.]], dtype=torch.float64)
    """
    cut = _CUTS.get(target)
    summed = cut(args, kwargs) if cut is not None else None
    if summed is None:
        return None
    made, size = summed
    bounds = sorted({size * k // min(_PARTS, size) for k in range(min(_PARTS, size) + 1)})
    pieces = [made(start, stop) for start, stop in itertools.pairwise(bounds)]
    total = torch.stack(pieces).sum(0)
    front = torch.zeros_like(total)
    largest = total.abs()
    for piece in pieces:
        front = front + piece
        largest = torch.maximum(largest, torch.maximum(front.abs(), (total - front).abs()))
    return largest


Cut = tuple[Callable[[int, int], Tensor], int]
"""What makes a part, from a first to a last index of what is summed, and how many indices there are."""


def _product(first: int) -> Callable[[Sequence[Any], Any], Cut | None]:
    def cut(args: Sequence[Any], kwargs: Any) -> Cut | None:
        a, b = (v.double() for v in args[first : first + 2])
        return (lambda i, j: a[..., i:j] @ b[..., i:j, :]), a.shape[-1]

    return cut


def _sum(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x: Tensor = args[0]
    dims = args[1] if len(args) > 1 else None
    keep = len(args) > 2 and bool(args[2])
    summed = [d % x.dim() for d in dims] if dims else list(range(x.dim()))
    if not summed or not x.is_floating_point() or not x.numel():
        return None
    longest = max(summed, key=lambda d: x.shape[d])
    wide = x.double()
    return (lambda i, j: wide.narrow(longest, i, j - i).sum(summed, keep)), x.shape[longest]


def _mean(args: Sequence[Any], kwargs: Any) -> Cut | None:
    summed = _sum(args, kwargs)
    if summed is None:
        return None
    made, size = summed
    x: Tensor = args[0]
    dims = args[1] if len(args) > 1 and args[1] else range(x.dim())
    count = torch.Size(x.shape[d] for d in dims).numel()
    return (lambda i, j: made(i, j) / count), size


def _convolution(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, weight, _, *how = args
    transposed, groups = how[3], how[5]
    if transposed or groups != 1:
        return None
    x, weight = x.double(), weight.double()
    operator: OpOverload = aten.convolution.default
    return (lambda i, j: operator(x[:, i:j], weight[:, i:j], None, *how)), weight.shape[1]


_CUTS: dict[Any, Callable[[Sequence[Any], Any], Cut | None]] = {
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.convolution.default: _convolution,
}
