"""Rounding: how far a result is from float64, in multiples of what rounding does to it at no fault.

No tolerance is written down but one: how many times as far off a result may be. The yardstick is the largest of three: what results that
are right are off by, correct rounding, and what half a unit in the last place of the *inputs* does to the result, which no way to compute
it can be blamed for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpasses.graphs.numbers import computable

LIMIT = 8.0
"""How many times as far off a rewrite may be, as a root mean square over a tensor. Right ones were at most 5 times as far: a matmul in bfloat16
whose inner dimension is split into 64 parts, say. A sum of 256 that is accumulated in bfloat16 is 9 to 15 times as far, of 1,024 up to 180 times."""
PROGRAM_LIMIT = 16.0
"""The same for a whole program, or what Inductor makes of one: of 1,080 small models with GELU, that is at most 6 times as far."""
EXACT = 2.0**53
"""So many times as far off: what is right is an exact zero, and its rounding no measure."""


@dataclass(frozen=True)
class Distance:
    """The distance of a result from float64.

    Attributes:
        times: as far off as it may be at no fault; infinite for an integer, or what is not finite any more.
        before: root mean square of the distances from float64, of what is right.
        after: the same, of the result.
        ulps: ``after`` in units in the last place of the largest value.
        element: where the result is farthest off.
        values: there, what is right, and the result.
        where: the call at which digits are lost, and the user's line, where that is known.
    """

    times: float
    before: float
    after: float
    ulps: float
    element: tuple[int, ...]
    values: tuple[float, float]
    where: str = ""

    def __str__(self) -> str:
        where = f"element {list(self.element)}: " if self.element else ""
        most = f"{where}{self.values[0]:.9g} became {self.values[1]:.9g}"
        if self.times > EXACT:
            return most
        return (
            f"off by {self.after:.3g} from float64 in the mean ({self.ulps:.3g} ulp), {self.times:.3g} times as far "
            f"as rounding takes it (before: {self.before:.3g}); most at {most}"
            + (self.where and f"; digits are lost at {self.where}")
        )


def distance(
    usual: Tensor, result: Tensor, wide: Sequence[Tensor], among: Tensor | None = None
) -> Distance | None:
    """Measure how far a result is from float64.

    Args:
        usual: what is right but for rounding.
        result: what stands for it, of the same shape and type.
        wide: what is right in float64, then the same for inputs that differ by up to half a unit. Where there is no float64, ``usual``
            and the same for inputs that differ by a unit.
        among: the elements of floats whose rounding is looked at; all, if it is None.

    Returns:
        ``None`` where the result has the bits of the usual one, or is right where anything is.
    """
    if not usual.numel() or same_bits(usual, result):
        return None
    wide = [value for value in wide if value.shape == usual.shape]
    if usual.is_complex():
        real = [torch.view_as_real(value.resolve_conj()) for value in (usual, result, *wide)]
        return distance(real[0], real[1], real[2:])
    if not usual.is_floating_point():
        wrong = usual != result
        for other in wide:  # an index of a largest element, say, that rounding alone turns over
            wrong &= other == usual
        return of_element(usual, result, wrong)
    center, got = (wide[0] if wide else usual).double(), result.double()
    broken = usual.isfinite() & ~got.isfinite()
    broken |= ~usual.isfinite() & (_class(usual) == _class(center)) & (_class(got) != _class(center))
    if broken.any():
        return of_element(usual, result, broken)
    known = center.isfinite() & usual.isfinite() & got.isfinite()
    for run in wide:
        known &= run.isfinite()
    if among is not None:
        known &= among
    if not known.any():
        return None

    def rms(value: Tensor) -> float:
        return value[known].square().mean().sqrt().item()

    unit = spacing(center.nan_to_num(), usual.dtype)
    off = torch.where(known, (got - center).abs(), 0.0)
    after, before = rms(off), rms(usual.double() - center)
    reach = max((rms(run.double() - center) for run in wide), default=0.0)
    floor = max(rms(unit) / 12**0.5, before, reach, torch.finfo(torch.float64).tiny)
    at = _index(off)
    values = center[at].item(), got[at].item()
    return Distance(after / floor, before, after, after / max(unit[known].max().item(), 5e-324), at, values)


def of_element(usual: Tensor, result: Tensor, wrong: Tensor) -> Distance | None:
    """The first of the elements that are wrong, as infinitely far off. Args: what is right, the result, and where it is wrong."""
    if not wrong.any():
        return None
    at = _index(wrong.double())
    return Distance(math.inf, 0.0, math.inf, math.inf, at, (usual[at].item(), result[at].item()))


def _index(value: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(value.flatten().argmax().cpu(), value.shape))


def _class(value: Tensor) -> Tensor:
    """0 for finite elements, else which kind of not finite."""
    return torch.nan_to_num(value.double(), nan=9.0, posinf=1.0, neginf=-1.0) * ~value.isfinite()


def same_bits(a: Tensor, b: Tensor, signs: bool = False) -> bool:
    """Whether two tensors are equal, NaN to NaN.

    Args:
        a: a tensor.
        b: one of the same shape and dtype.
        signs: whether zeros have to have the same sign, too.
    """
    if signs and bool(other_sign(a, b).any()):
        return False
    a, b = computable(a), computable(b)
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def other_sign(a: Tensor, b: Tensor) -> Tensor:
    """Where one of two equal numbers is zero and the other one minus zero."""
    a, b = computable(a), computable(b)
    if a.is_complex():
        return other_sign(*(torch.view_as_real(value.resolve_conj()) for value in (a, b))).any(-1)
    if not a.is_floating_point():
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    return (a == 0) & (b == 0) & (a.signbit() != b.signbit())


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each (float64) value to the next one of ``dtype``: one unit in the last place.

    >>> spacing(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), torch.bfloat16)[:2]
    tensor([0.0078, 0.0156], dtype=torch.float64)
    """
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(info.smallest_normal, info.max)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent)


def next_to(inputs: Sequence[Any], seed: int, units: float = 2.0) -> list[Any]:
    """The inputs in their own types, with each element moved by up to a unit in the last place. Args: those of :func:`moved`."""
    wide = moved(inputs, seed, units=units)
    return [m.to(v.dtype) if isinstance(v, Tensor) else m for m, v in zip(wide, inputs, strict=True)]


def moved(
    inputs: Sequence[Any], seed: int, dtype: torch.dtype | None = None, units: float = 1.0
) -> list[Any]:
    """The inputs, in float64, with each element moved by up to half a unit in the last place; by a whole one of float64.

    Args:
        inputs: of a graph; what is no floating tensor stays.
        seed: of the amounts.
        dtype: of which the units are; each input's own, if it is None.
        units: by up to half of so many units instead.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        wide = value.detach().double()
        amount = torch.rand(wide.shape, generator=generator, dtype=torch.float64).to(wide.device) - 0.5
        unit = spacing(wide.nan_to_num(), dtype or value.dtype)
        if (dtype or value.dtype) is torch.float64:  # less than a unit is none
            amount = amount.sign()
        return torch.where(wide.isfinite() & (wide != 0), wide + amount * units * unit, wide)

    return [one(value) for value in inputs]
