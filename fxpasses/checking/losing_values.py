"""Values on which a window may lose digits: large ones, numbers near one, and what another type rounds over a number that is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.checking.compared_numbers import MOST_TURNS, broadcasts, in_turn, window_calls, written_numbers
from fxpasses.checking.rounding import spacing
from fxpasses.checking.windows import Window
from fxpasses.graphs.rewriting import value_of

_LARGE, _CLOSE = 16.0, 1 / 3
"""What activations are far from their middle on; the part of a type's digits at which numbers differ of whose squares a difference loses two thirds."""
_INSIDE = (1 / 32, -1 / 32, 1 / 4, -1 / 4)
"""Parts of a unit: a number that is compared is hardly ever nearer than the smaller one to where a coarser type rounds to its other side."""
_MOST_HELD = 16
"""Numbers of another input that are tried."""


def losing_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Values of the free inputs, all in another way, and what they are."""
    if not free:
        return
    usual = {name: given[name].nan_to_num(0.0, 0.0, 0.0) for name in free}
    usual = {name: value / value.square().mean().sqrt().clamp(min=1e-30) for name, value in usual.items()}
    held = {v.dtype for v in (*window.inputs, *map(value_of, window_calls(window))) if isinstance(v, Tensor)}
    kinds = [torch.finfo(dtype) for dtype in held if dtype.is_floating_point]
    if all(kind.bits >= 32 for kind in kinds):  # few digits are few there whatever is done
        yield (
            {name: _LARGE * value for name, value in usual.items()},
            f"with a root mean square of {_LARGE:g}",
        )
    for digits in sorted({kind.eps for kind in kinds}):
        close = 2.0 ** math.floor(_CLOSE * math.log2(digits))
        yield {name: 1 + close * value for name, value in usual.items()}, "near one"


def narrowed_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Values of the free inputs, one after the other, that differ from what a window compares, and from each other, by less than its coarser types tell.

    Args:
        window: of calls that choose.
        given: its inputs, in float64, by name.
        free: those that may be any floats.
    """
    values = (*window.inputs, *map(value_of, window_calls(window)))
    held = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    digits = {torch.finfo(dtype).eps: dtype for dtype in held}
    for eps in sorted(digits)[1:]:
        where = f"within half a unit of {str(digits[eps]).removeprefix('torch.')} of what is compared"
        for name in free:
            value = given[name]
            numbers = [number.expand(value.shape) for number in _compared_with(name, window, given)]
            known = torch.stack(numbers) if numbers else value[None][:0]
            near = torch.stack([known + part * spacing(known, digits[eps]) for part in _INSIDE], 1).flatten(
                0, 1
            )
            for turn in range(min(MOST_TURNS, -(-2 * len(near) // value.numel()))):
                yield {name: in_turn(value, near, turn * value.numel())}, where
            yield {name: _nearly_tied(value, digits[eps])}, where


def _compared_with(name: str, window: Window, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Numbers that an input may be compared with: of other inputs, and those that the window is written with."""
    value = given[name]
    for other, held in given.items():
        if other == name or not isinstance(held, Tensor) or not held.is_floating_point():
            continue
        if broadcasts(held, value):
            yield held
        else:
            yield from held.flatten()[:_MOST_HELD]
    yield from value.new_tensor([number for number in written_numbers(window) if number])


def _nearly_tied(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Every second element of a row, in their order, is just beside the one before."""
    if not value.dim() or value.shape[-1] < 2:
        return value
    ordered = value.sort(-1)
    close, count = ordered.values.clone(), value.shape[-1] // 2 * 2
    close[..., 1:count:2] = close[..., 0:count:2] + spacing(close[..., 0:count:2], dtype) / 4
    return torch.empty_like(value).scatter(-1, ordered.indices, close)
