"""Made-up inputs of the sizes of real ones, for mistakes that real values hide.

In a model that has just been made, all norms have the weight one and the bias zero, activations are small, and a batch of tokens leaves
most of a vocabulary out. So a rewrite is tried on other values, too:

* every floating or complex value moved at random, and indices drawn from all that the graph can look up, one of them from the
  end, one twice
* values many times as large, with the other sign
* values so large that their exponential is infinite
* values a million times as large, of one sign in each row: beyond what may have been taken for infinite
* multiples of a half, so that some are equal, some zero, and some half way between two integers; where the graph can do with
  it, whole rows and columns are zero, too (the norm of a row, the sum of a column)
* with NaN and infinities in places: a pass that promises the same bits keeps them, others may not make more of them
* integers that are only calculated with: any that their type can hold
* integers that the graph compares with a constant (the label to ignore, the token of padding): that constant, in places
* flags: rows where none holds, where some do, where all do (a mask that leaves nothing over), each at least once; where the graph cannot do with
  that (a count of flags that is an index), one at least in each row
* rows of equal values: no variance, and every element the largest
* in float16, values as large as the graph stands, but for a factor of four
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import cloned
from fxpasses.checking.integers import compared_constants, free_numbers, index_bounds, may_be_negative
from fxpasses.graphs.rewriting import value_of

__all__ = ["Variant", "variants"]

_FACTORS = ((32.0, False), (32.0, True), (4.0, True))
"""How much larger values become, and whether tensors of positive values stay positive: each is tried where the one before
leads to NaN or infinities (the root of a variance, an overflow)."""

_MILLION = 2.0**20
"""Beyond what is often taken for infinite (a mask of -10000); an exact factor, so that nothing else changes where nothing is added."""

_POWERS = range(14, -1, -1)
"""Powers of two by which values in float16 are made larger: its largest number is below 2**16."""
_SPARE = 2
"""Number of these powers that are left: a right rewrite adds parts that may be larger than their sum."""

_BROKEN = (0.0, 0.25)
"""Which share of a tensor's elements is not finite, for each of NaN and the two infinities: in few places (one each) what is
computed between them stays to be seen, in many each row has one."""


_SHARES = (0.0, 1.0, 0.5)
"""How many flags of a row hold, row by row."""


@dataclass(frozen=True)
class Variant:
    """One kind of made-up values.

    Attributes:
        choices: the inputs; each is tried where the graph does not stay finite on the one before.
        label: what they are, in words.
        broken: whether they hold NaN and infinities on purpose.
        spare: how many choices after the first with which the graph stays finite the one is that is taken.
    """

    choices: Iterable[list[Any]]
    label: str
    broken: bool = False
    spare: int = 0


def variants(
    gm: fx.GraphModule, given: Sequence[Any], bitwise: bool, generator: torch.Generator
) -> Iterator[Variant]:
    """Other values for the first inputs of a graph.

    Args:
        gm: the graph.
        given: real inputs.
        bitwise: whether the rewrite promises the same bits, so that NaN and infinities are looked at closely.
        generator: of the random numbers.

    Raises:
        Unsupported: for an input that cannot be copied.
    """
    bounds, free, constants = index_bounds(gm), free_numbers(gm), compared_constants(gm)
    nodes = gm.graph.find_nodes(op="placeholder")
    turns = itertools.cycle((True, False))

    def made(change: Any) -> list[Any]:
        values, repeats = cloned(given), next(turns)
        with torch.no_grad():
            for node, value in zip(nodes, values, strict=False):
                if not isinstance(value, Tensor) or not value.numel() or _overlaps_itself(value):
                    continue
                if value.is_complex():
                    value = torch.view_as_real(value.conj() if value.is_conj() else value)
                if value.is_floating_point():
                    # Positive values may have to stay so (a variance), infinite ones are masks.
                    value.copy_(torch.where(value.isfinite(), change(value), value))
                elif node.name in bounds:
                    drawn = torch.randint(bounds[node.name], value.shape, generator=generator).view(-1)
                    drawn[0] = bounds[node.name] - 1  # the last one, in any case
                    if drawn.numel() > 1:  # a single one may be all that is to be looked at
                        drawn[-1] = drawn[0] if repeats else drawn[-1]
                        drawn[-1] -= bounds[node.name] if may_be_negative(node) else 0
                    drawn = drawn.view(value.shape)
                    value.copy_(drawn)
                elif node.name in free:
                    value.copy_(_any_numbers(value, generator))
                _put_in_places(value, constants.get(node.name, ()), generator)
        return values

    flags = [
        node.name
        for node, value in zip(nodes, given, strict=False)
        if _is_flag(value, node.name in bounds or node.name in free)
    ]
    # An index that does not exist is an error on the CPU; elsewhere it ends the process's work with the device.
    looked_up = any(name not in free for name in flags) and all(_is_on_cpu(v) for v in given)

    def with_flags(turn: int, names: Collection[str], least: int) -> list[Any]:
        values = cloned(given)
        for node, value in zip(nodes, values, strict=False):
            if node.name in names and value.numel() and not _overlaps_itself(value):
                value.copy_(_rows_of_flags(value, generator, turn, least))
        return values

    def moved(value: Tensor) -> Tensor:
        noise, other = (torch.randn(value.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        scale = (1 + 0.5 * noise).abs() * value.double()
        noise = 0.1 * other.to(value.device)
        return scale + (noise.abs() if _is_positive(value) else noise)

    def enlarged(factor: float, keep_positive: bool) -> Any:
        return lambda value: value * (factor if keep_positive and _is_positive(value) else -factor)

    def overflowing(value: Tensor) -> Tensor:
        # Twice the number at which the exponential overflows, for the largest: what takes off a maximum first stays finite.
        largest = value.abs().nan_to_num(0, 0, 0).max().item()
        return value * (2 * math.log(torch.finfo(value.dtype).max) / largest if largest else 1.0)

    def far_away(value: Tensor) -> Tensor:
        if _is_positive(value):
            return value * _MILLION
        sign = torch.rand(value[..., :1].shape if value.dim() else (), generator=generator) < 0.5
        return value.abs() * torch.where(sign, _MILLION, -_MILLION).to(value.device, value.dtype)

    def halves(least: float, empty_rows: bool = False) -> Any:
        def change(value: Tensor) -> Tensor:
            steps = (torch.randn(value.shape, generator=generator) * 2).round().to(value.device) / 2
            if empty_rows and not _is_positive(value):
                _clear_rows(steps, generator)
            if steps.numel():  # a zero with a sign, which a sum with zero loses
                steps.view(-1)[int(torch.randint(steps.numel(), (), generator=generator))] = -0.0
            return steps.abs().clamp(least) if _is_positive(value) else steps

        return change

    def constant_rows(value: Tensor) -> Tensor:
        return value[..., :1].expand_as(value) if value.dim() else value

    def broken(share: float) -> Any:
        def change(value: Tensor) -> Tensor:
            value = value.clone(memory_format=torch.contiguous_format)
            flat = value.view(-1)
            count = max(1, int(share * flat.numel()))
            places = torch.randperm(flat.numel(), generator=generator)
            for number, bad in enumerate((math.nan, math.inf, -math.inf)):
                flat[places[number * count : (number + 1) * count]] = bad
            return value

        return change

    yield Variant([made(moved)], "other values")
    yield Variant(
        [made(enlarged(*choice)) for choice in _FACTORS], "values many times as large, signs reversed"
    )
    yield Variant([made(overflowing)], "values whose exponential is infinite")
    yield Variant([made(far_away)], "values a million times as large, of one sign in a row")
    yield Variant(
        [made(halves(0.0, empty_rows=True)), made(halves(0.0)), made(halves(0.5))],
        "multiples of a half, many of them equal, some rows zero",
    )
    yield Variant([made(constant_rows)], "rows of equal values")
    if any(isinstance(v := value_of(node), Tensor) and v.dtype is torch.float16 for node in gm.graph.nodes):
        larger = (made(enlarged(-(2.0**power), False)) for power in _POWERS)
        yield Variant(larger, "values nearly as large as float16 stands", spare=_SPARE)
    for turn in range(_turns(given, flags, nodes)):
        # Where the graph makes NaN of a row without flags, nothing can be said about such rows.
        choices = [with_flags(turn, flags, least) for least in (0, 1)] if looked_up else []
        choices.append(with_flags(turn, [name for name in flags if name in free], 0))
        yield Variant(choices, "rows of flags that hold nowhere or everywhere")
    for share in _BROKEN if bitwise else _BROKEN[:1]:
        yield Variant([made(broken(share))], "NaN and infinities in places", broken=True)


def _any_numbers(value: Tensor, generator: torch.Generator) -> Tensor:
    """Integers of either sign, one half small and the others as large as the type allows (at most 40 bits)."""
    if value.dtype is torch.bool:
        return torch.randint(2, value.shape, generator=generator).bool()
    info = torch.iinfo(value.dtype)
    low, high = max(info.min, -(1 << 40)), min(info.max, 1 << 40)
    small = torch.randint(max(low, -20), min(high, 20), value.shape, generator=generator)
    large = torch.randint(low, high, value.shape, generator=generator)
    return torch.where(torch.rand(value.shape, generator=generator) < 0.5, small, large).to(value.dtype)


def _put_in_places(value: Tensor, constants: Sequence[int], generator: torch.Generator) -> None:
    """Write each of some numbers into one element, but never into all elements."""
    places = torch.randperm(value.numel(), generator=generator)[: max(value.numel() - 1, 0)]
    for place, constant in zip(places.tolist(), constants, strict=False):
        value[tuple(torch.unravel_index(torch.tensor(place), value.shape))] = constant


def _clear_rows(value: Tensor, generator: torch.Generator) -> None:
    """Set one row and one column of zeros, along the dimensions that have three or more of them."""
    for dim, size in enumerate(value.shape):
        if value.dim() > 1 and size > 2:
            value.select(dim, int(torch.randint(size, (), generator=generator))).zero_()


def _rows_of_flags(value: Tensor, generator: torch.Generator, turn: int, least: int) -> Tensor:
    """Rows of flags: one of three has none that holds (or one, with ``least``), one has only such, and one is drawn; which one is first is its turn."""
    if not value.dim():
        return ~value if turn % 2 == 0 else value
    rows = value[..., :1]
    kinds = (torch.arange(rows.numel()) + turn) % len(_SHARES)
    shares = torch.tensor(_SHARES)[kinds].view(rows.shape)
    drawn = torch.rand(value.shape, generator=generator) < shares
    if least:
        drawn[..., 0] = True  # the first one: what counts them is an index from there on
    return drawn.to(value.device)


def _turns(given: Sequence[Any], flags: Collection[str], nodes: Sequence[fx.Node]) -> int:
    """The number of times that flags are made up until each kind of row was there, in the input with the fewest rows."""
    values = [v for node, v in zip(nodes, given, strict=False) if node.name in flags]
    rows = [max(v[..., :1].numel(), 1) if v.dim() else 1 for v in values]
    return -(-len(_SHARES) // min(len(_SHARES), *rows)) if rows else 0


def _is_flag(value: Any, is_known: bool) -> bool:
    """Whether an input holds flags: truth values, or zeros and ones that are neither an index nor only calculated with."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return False
    if value.dtype is torch.bool:
        return True
    return not is_known and value.dim() > 0 and bool(((value == 0) | (value == 1)).all())


def _is_on_cpu(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def _is_positive(value: Tensor) -> bool:
    return bool((value >= 0).all())


def _overlaps_itself(value: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True))
