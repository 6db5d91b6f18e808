"""Values on which a window may lose precision: large, near one, or rounded across a compared number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.checking.comparison.rounding import spacing
from fxpasses.checking.comparison.same_function import Rewriting
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.compared_numbers import (
    MAX_TURNS,
    interleave,
    is_broadcastable,
    numbers_in_calls,
    window_calls,
)
from fxpasses.checking.critical.free_values import DependentValues, nearest_free_values
from fxpasses.checking.critical.given_values import input_names, is_float64_tensor
from fxpasses.checking.execution.interpret import as_float64
from fxpasses.graphs.rewriting import value_of

_LARGE, _DIGITS_FRACTION = 16.0, 1 / 3
"""Magnitude far from the middle of activations, and part of a dtype's digits by which numbers differ.

The difference of the squares of such numbers loses two thirds of the digits.
"""
_VANISHING = (2, 3)
"""Powers of that: next to one, so small a number loses two thirds of its digits, or all."""
_ULP_FRACTIONS = (1 / 32, -1 / 32, 1 / 4, -1 / 4)
"""Parts of a unit: compared numbers are hardly closer to where a coarser dtype rounds across them."""
_MAX_HELD = 16
"""How many numbers of another input to try."""


def losing_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield values of all free inputs at once, each time of a different kind, and a description.

    Args:
        window: what changed.
        given: its inputs, in float64, by name.
        free: those that may be any floats.

    Yields: the values by name, and a text for the verdict.
    """
    if not free:
        return
    usual = {name: given[name].nan_to_num(0.0, 0.0, 0.0) for name in free}
    usual = {name: value / value.square().mean().sqrt().clamp(min=1e-30) for name, value in usual.items()}
    kinds = [torch.finfo(dtype) for dtype in _float_dtypes(window)]
    if all(kind.bits >= 32 for kind in kinds):  # few digits stay few whatever is done
        yield (
            {name: _LARGE * value for name, value in usual.items()},
            f"with a root mean square of {_LARGE:g}",
        )
    for digits in sorted({kind.eps for kind in kinds}):
        close = _perturbation(digits)
        yield {name: 1 + close * value for name, value in usual.items()}, "near one"
        yield from (
            ({name: close**n * value for name, value in usual.items()}, "near zero") for n in _VANISHING
        )


def followed_values(rewriting: Rewriting, window: Window) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield values near zero of window inputs that follow a free one, such as an exponential.

    A window of low precision may have no digits left there.

    Args:
        rewriting: the graphs.
        window: what changed.
    """
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others, names = {node.name for node in rewriting.after.graph.nodes}, input_names(window)
    generator = torch.Generator().manual_seed(len(names))
    few = [kind.eps for kind in map(torch.finfo, _float_dtypes(window)) if kind.bits < 32]
    for digits, name in itertools.product(few, names):
        value = as_float64(rewriting.values.get(name))
        if not is_float64_tensor(value) or nodes[name].op != "call_function" or name not in others:
            continue
        for source in nearest_free_values(nodes[name], only_graph_inputs=False):
            dependents = DependentValues(rewriting.before, [source], names, rewriting.values)
            bounds = dependents.bounds(name) if source.name in others and dependents.is_independent else None
            sign = -1 if bounds is not None and bounds[1] <= 0 else 1
            small = (
                sign
                * _perturbation(digits) ** _VANISHING[-1]
                * (1 - torch.rand(value.shape, generator=generator).to(value) / 2)
            )
            found = None if bounds is None else dependents.solve(name, small)
            if found is not None:
                yield {**found, name: small}, "near zero"  # what one element can be, others can be
                break


def _perturbation(digits: float) -> float:
    return 2.0 ** math.floor(_DIGITS_FRACTION * math.log2(digits))


def _float_dtypes(window: Window) -> set[torch.dtype]:
    """The float dtypes in a window."""
    values = (*window.inputs, *map(value_of, window_calls(window)))
    return {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}


def narrowed_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield values of the free inputs, one at a time, that coarser dtypes confuse with compared ones.

    Or with each other.

    Args:
        window: of calls that choose.
        given: its inputs, in float64, by name.
        free: those that may be any floats.
    """
    digits = {torch.finfo(dtype).eps: dtype for dtype in _float_dtypes(window)}
    for eps in sorted(digits)[1:]:
        where = f"within half a unit of {str(digits[eps]).removeprefix('torch.')} of what is compared"
        for name in free:
            value = given[name]
            numbers = [number.expand(value.shape) for number in _compared_with(name, window, given)]
            known = torch.stack(numbers) if numbers else value[None][:0]
            near = torch.stack(
                [known + part * spacing(known, digits[eps]) for part in _ULP_FRACTIONS], 1
            ).flatten(0, 1)
            for turn in range(min(MAX_TURNS, -(-2 * len(near) // value.numel()))):
                yield {name: interleave(value, near, turn * value.numel())}, where
            yield from (({name: _nearly_tied(value, digits[eps], up)}, where) for up in (True, False))


def _compared_with(name: str, window: Window, given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield numbers that an input may be compared with: those of other inputs, and those in calls."""
    value = given[name]
    for other, held in given.items():
        if other == name or not isinstance(held, Tensor) or not held.is_floating_point():
            continue
        if is_broadcastable(held, value):
            yield held
        else:
            yield from held.flatten()[:_MAX_HELD]
    yield from value.new_tensor([number for number in numbers_in_calls(window) if number])


def _nearly_tied(value: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """Neighbors in the order of a row that a coarser dtype cannot tell apart, the later one larger or not."""
    count = value.shape[-1] // 2 * 2 if value.dim() else 0
    if not count:
        return value
    ordered = value.sort(-1)
    base = ordered.values[..., 0:count:2].to(dtype).to(value)
    pairs = torch.stack([base, base + spacing(base, dtype) / (4 if up else -4)], -1).flatten(-2)
    places = ordered.indices[..., :count].unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)
    return value.scatter(-1, places, pairs)
