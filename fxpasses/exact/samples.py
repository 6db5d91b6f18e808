"""Inputs for a sample: random ones, on which the error bound rests, and families that break rewrites.

Floats have few bits, so that every float dtype represents them exactly. Integers stay in the range of the
example, and sorted ones stay sorted: an index that is in bounds for the example is in bounds for every
sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx

from fxpasses.exact.same_values import MASK
from fxpasses.graphs.numbers import computable

Edge = Literal[
    "ties",
    "rows",
    "not a number",
    "infinity",
    "zeros",
    "all zero",
    "signs",
    "extreme integers",
    "index bounds",
]
Family = Literal["example", "numbers", "random"] | Edge
EDGES: tuple[Edge, ...] = get_args(Edge)
"""Families that are not random points: they find errors, and prove nothing."""

_FRACTION_SCALE = 2.0**22


def sample_input(example: Tensor, family: Family, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Return a value for an input.

    Args:
        example: a value that the input has had.
        family: which kind of value.
        generator: of random numbers.
        scale: a factor for floats.

    Returns:
        A float64 tensor for a float one, complex128 for a complex one, else one of the dtype of the example.
    """
    example = example.detach()
    if family in ("example", "numbers") or example.numel() == 0:
        value = example.clone()
        return value.double() * scale if value.is_floating_point() else value
    if example.is_complex():
        parts = torch.view_as_real(example.resolve_conj())
        return torch.view_as_complex(sample_input(parts, family, generator, scale).contiguous())
    if example.dtype is torch.bool:
        return _sample_bools(example, family, generator)
    if family in ("random", "ties", "rows") and is_mask(example):
        return _sample_bools(example, family, generator).to(example.dtype)
    if not example.is_floating_point():
        return example.clone() if family == "index bounds" else _sample_integers(example, family, generator)
    return _sample_floats(example, family, generator) * scale


def is_unconstrained_integer(example: Any) -> bool:
    """Whether a tensor holds integers that may be any the graph takes: no truth values or ordered offsets."""
    if (
        not isinstance(example, Tensor)
        or example.dtype not in (torch.int32, torch.int64)
        or not example.numel()
    ):
        return False
    return not is_mask(example) and not is_ordered(example)


def is_ordered(example: Tensor) -> bool:
    """Whether integers may be offsets: several, never decreasing, not all the same unless zero."""
    if example.dim() != 1 or len(example) < 2:
        return False
    numbers = computable(example)
    rises = bool((numbers[1:] >= numbers[:-1]).all())
    return rises and (bool(numbers[0] == 0) or bool(numbers[-1] > numbers[0]))


def is_mask(example: Tensor) -> bool:
    """Whether an integer tensor holds truth values: ones and zeros, and not the offsets 0 and 1."""
    return (
        not example.is_floating_point()
        and example.dim() > 1
        and bool(((example == 0) | (example == 1)).all())
        and bool((example == 1).any())
    )


def _sample_bools(example: Tensor, family: Family, generator: torch.Generator) -> Tensor:
    value = torch.rand(example.shape, generator=generator) < 0.6
    if family == "rows" and example.dim() and example.shape[-1]:
        rows = value.view(-1, example.shape[-1])
        rows[0] = True
        rows[-1] = False  # a fully masked row
    elif family == "ties" and example.dim() and example.shape[-1] > 1:
        # All but one: low precision represents the number of all (300), and not that of the others (299).
        rows = value.view(-1, example.shape[-1])[::2]
        rows.fill_(True)
        rows[:, int(torch.randint(example.shape[-1], (1,), generator=generator))] = False
    return value


def _sample_integers(example: Tensor, family: Family, generator: torch.Generator) -> Tensor:
    numbers = computable(example)
    low, high = int(numbers.min()), int(numbers.max())
    ordered = is_ordered(example)
    if (
        family == "extreme integers"
        and example.dtype in (torch.int8, torch.uint8, torch.int16)
        and not ordered
    ):
        ends, near = torch.iinfo(example.dtype), torch.randint(0, 2, example.shape, generator=generator)
        value = ends.max - near
        if value.dim():
            rows, near_rows = (v.view(-1, v.shape[-1] if v.dim() > 1 else 1) for v in (value, near))
            lower = (len(rows) + 1) // 2 if value.dim() > 1 else max(len(rows) - 1, 1)
            rows[lower:] = ends.min + near_rows[lower:]
        return value.to(example.dtype)
    value = torch.randint(low, high + 1, example.shape, generator=generator)
    if not ordered:
        value = _sample_from_ranges(numbers, value, generator)
    if ordered:
        value = value.sort().values
        value[0] = example[0]  # keep the first offset
        if family == "ties":
            value = value[torch.arange(len(value)) // 2 * 2]
    elif family == "rows" and value.dim() and value.numel():
        rows = value.view(-1, value.shape[-1])
        rows.copy_(rows[:, :1].clone().expand_as(rows))  # all the same, so that other segments are empty
    elif family == "ties":
        value = torch.where(torch.rand(example.shape, generator=generator) < 0.5, high, value)
    if bool((numbers != 0).all()):  # they may be divisors
        value = torch.where(value == 0, numbers, value)
    return value.to(example.dtype)


def _sample_from_ranges(numbers: Tensor, value: Tensor, generator: torch.Generator) -> Tensor:
    """Draw random integers from the range of the given ones.

    If some are negative or far from the rest, there are two ranges: a label to ignore is not the lowest
    index.
    """
    distinct = numbers.unique().long()
    gaps = distinct.diff()
    if bool(distinct[0] < 0) and bool(distinct[-1] >= 0):
        at = int((distinct < 0).sum()) - 1
    elif len(gaps) and 2 * int(gaps.max()) > int(distinct[-1] - distinct[0]):
        at = int(gaps.argmax())
    else:
        return value
    below = (
        numbers.flatten()[torch.randint(numbers.numel(), value.shape, generator=generator)] <= distinct[at]
    )
    low = torch.randint(int(distinct[0]), int(distinct[at]) + 1, value.shape, generator=generator)
    high = torch.randint(int(distinct[at + 1]), int(distinct[-1]) + 1, value.shape, generator=generator)
    return torch.where(below, low, high)


def _sample_floats(example: Tensor, family: Family, generator: torch.Generator) -> Tensor:
    values = example.double()
    unmasked = values[torch.isfinite(values) & (values.abs() < MASK)]
    if len(unmasked) < values.numel():  # a mask: permute its values
        order = torch.randperm(values.numel(), generator=generator)
        return values.flatten()[order].view(values.shape)
    scale = float(unmasked.abs().mean()) or 1.0
    scale = 2.0 ** round(math.log2(scale)) if 1e-3 < scale < 1e3 else 1.0
    positive = bool((unmasked >= 0).all()) and bool((unmasked > 0).any())
    value = torch.randn(example.shape, generator=generator)  # float32 represents the bits that are kept
    if positive and family != "signs":  # may be a variance
        value = value.abs() + 0.25
    value = ((value * _FRACTION_SCALE).round() / _FRACTION_SCALE).double()
    if family == "signs" and value.dim():
        # Rows of either sign, and mixed ones. Images get a negative corner, for windows at a border.
        rows = value.view(-1, value.shape[-1])
        rows[::3] = -rows[::3].abs()
        rows[1::3] = rows[1::3].abs()
        if value.dim() > 2:
            part = tuple(slice(-(-n // 2)) for n in value.shape[-3:-1])
            corner = value.view(-1, *value.shape[-3:])[0][part]
            corner.copy_(-corner.abs())
    elif family == "ties":
        value = torch.randint(-3, 4, example.shape, generator=generator) / 2.0 + (2.0 if positive else 0.0)
        rows = value.view(-1, value.shape[-1] if value.dim() else 1)
        rows[1::4] = rows[: len(rows) - 1 : 4]  # rows may be compared: keys, codes, experts
    elif family == "all zero":  # so are rows computed by sums and products, and their norms and variances
        value = torch.zeros_like(value)
    elif family == "zeros":
        count = -(-value.numel() // 5)
        order = torch.randperm(value.numel(), generator=generator)
        flat = value.view(-1)
        flat[order[:count]], flat[order[count : 2 * count]] = -0.0, 0.0
    elif family == "rows" and value.dim():
        rows = value.reshape(-1, value.shape[-1])
        rows[0] = rows[0, 0]
        rows[-1] = 1.0 if positive else 0.0
        value = rows.view(example.shape)
    elif family in ("not a number", "infinity"):
        # One in each row of the first half, which a mask may hide, and several in one row, so that one
        # of them is visible. Sums over rows stay finite in the others.
        rows = value.view(-1, value.shape[-1] if value.dim() else 1)
        bad = math.nan if family == "not a number" else math.inf
        half = torch.arange(len(rows) // 2)
        rows[half, torch.randint(rows.shape[1], half.shape, generator=generator)] = bad
        row = rows[int(torch.randint(len(rows), (1,), generator=generator))]
        at = torch.rand(row.shape, generator=generator) < 0.5
        at[int(torch.randint(len(row), (1,), generator=generator))] = True
        row[at] = bad
    return value * scale


def expects_sorted(gm: fx.GraphModule) -> list[bool]:
    """Whether each input is expected to be sorted: boundaries of `searchsorted`, also through other calls."""
    boundaries = set()
    for node in gm.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (torch.ops.aten.searchsorted, torch.ops.aten.bucketize):
            found = node.args[0 if packet is torch.ops.aten.searchsorted else 1]
            while (
                isinstance(found, fx.Node) and found.op == "call_function" and len(found.all_input_nodes) == 1
            ):
                found = found.args[0]
            boundaries.add(found)
    return [node in boundaries for node in gm.graph.find_nodes(op="placeholder")]


def sort_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph, with those sorted that it expects to be sorted."""
    pairs = zip(inputs, expects_sorted(gm), strict=True)
    return [
        value.sort().values if is_sorted and isinstance(value, Tensor) else value
        for value, is_sorted in pairs
    ]


def symbol_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[Any, int]:
    """Return the value of each symbol that is an input or a size of one."""
    found: dict[Any, int] = {}
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        value = node.meta.get("val")
        sizes = zip(value.shape, given.shape, strict=True) if isinstance(value, Tensor) else [(value, given)]
        for symbolic, size in sizes:
            if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                found[symbolic.node.expr] = int(size)
    return found


def evaluate_size(size: Any, values: Mapping[Any, int]) -> int:
    """Substitute values for the symbols of a size. Raises: TypeError: a value is unknown."""
    return int(size.node.expr.xreplace(values)) if isinstance(size, torch.SymInt) else int(size)
