"""Tolerance: how far a result may be from another one that is the same but for rounding.

The reference runs in float64 (the yardstick), in its own precision, and a few times with every operator's rounding
error resampled (:class:`~fxpasses.checking.interpret.RoundedRun`). The distances of these runs from the yardstick
are what rounding does to each element: in a cancellation much, in a copy nothing. A candidate is wrong where it is
several times as far away. No tolerance is written down anywhere: only how much *worse* than the reference a rewrite
may round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpasses.checking.rounding import spacing

__all__ = ["CLEAR", "WORSE", "Deviation", "deviation", "kernel_tolerance", "rounding_multiple", "same_bits"]

WORSE = 5.0
"""How much worse than the reference's the rounding of a rewrite may be, as a root mean square over many elements: 5 is
what 25 times as many roundings of the same size add up to. Over ``n`` elements it is ``5 * (1 + 3 / sqrt(2 n))``, since the
root mean square of ``n`` errors scatters itself: three of its standard deviations are added."""


_KERNELS = 100.0


def kernel_tolerance(dtype: torch.dtype) -> float:
    """How much worse than an operator's own rounding a kernel of Inductor's may be.

    Its vectorised functions are off by dozens of units in the last place (the error function by eight units of its largest value). What is
    held in low precision is computed in float32, whose units do not count there.

    >>> kernel_tolerance(torch.float32), kernel_tolerance(torch.bfloat16)
    (100.0, 5.0)
    """
    return WORSE if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize else _KERNELS


CLEAR = 500.0
"""A difference that is this many times beyond rounding needs no confirmation by more samples: that five samples are all so
much too close to each other happens once in 10**10 elements."""


@dataclass(frozen=True)
class Deviation:
    """The deviation of a value from the reference's.

    Attributes:
        error: the distance from the float64 run, where the difference is worst.
        reference_error: that of the reference there.
        ulps: ``error`` in units in the last place of the value's dtype.
        times: how many times as far away as rounding takes the reference; infinite for a NaN or an integer.
        elements: how many elements differ.
        index: the element where the difference is worst.
    """

    error: float
    reference_error: float
    ulps: float
    times: float
    elements: int
    index: tuple[int, ...]

    @property
    def is_clear(self) -> bool:
        """Whether the difference is beyond doubt."""
        return self.times > CLEAR

    def __str__(self) -> str:
        where = f" at {list(self.index)}" if self.index else ""
        if not self.error:  # found bit by bit only
            return f"a zero{where} has the other sign, {self.elements} element{'s' * (self.elements != 1)}"
        return (
            f"off by {self.error:.3g} from float64{where} ({self.ulps:.3g} ulp; the reference is off by "
            f"{self.reference_error:.3g}), {self.elements} element{'s' * (self.elements != 1)}"
        )


def same_bits(a: Tensor, b: Tensor, signs: bool = False) -> bool:
    """Whether two tensors are equal, NaN to NaN.

    Args:
        a: a tensor.
        b: one of the same shape and dtype.
        signs: whether zeros have to have the same sign, too.
    """
    if signs and bool(_other_sign(a, b).any()):
        return False
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def _as_real(value: Tensor) -> Tensor:
    """A complex tensor as one of real and imaginary parts."""
    return torch.view_as_real(value.resolve_conj())


def _other_sign(a: Tensor, b: Tensor) -> Tensor:
    """Where one of two equal numbers is zero and the other one minus zero."""
    if a.is_complex():
        return _other_sign(_as_real(a), _as_real(b)).any(-1)
    if not a.is_floating_point():
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    return (a == 0) & (b == 0) & (a.signbit() != b.signbit())


def deviation(
    native: Tensor,
    exact: Tensor | None,
    samples: Sequence[Tensor],
    candidate: Tensor,
    bitwise: bool = False,
    limit: float = WORSE,
) -> Deviation | None:
    """The deviation of ``candidate`` from the reference; ``None`` when rounding explains it.

    Args:
        native: the reference in its own precision.
        exact: the reference in float64, or ``None`` where it cannot be had.
        samples: the reference with its rounding resampled.
        candidate: what to judge; of the same shape and dtype.
        bitwise: whether every bit has to be equal.
        limit: see :data:`WORSE`.
    """
    if not native.numel() or same_bits(native, candidate, bitwise):
        return None
    if native.is_complex():
        native, candidate, *samples = map(_as_real, (native, candidate, *samples))
        exact = _as_real(exact) if exact is not None else None
    undefined = _undefined(native, samples)
    if bitwise or not native.is_floating_point():
        return _exact_difference(native, exact, samples, candidate, undefined, bitwise)
    center = (native if exact is None else exact).double()
    got, usual = candidate.double(), native.double()
    # Where the reference overflows its type, or is NaN itself, there is no distance to compare.
    broken = (got.isnan() != usual.isnan()) | (got.isinf() & usual.isfinite())
    broken &= ~undefined & ~(usual.isinf() | center.isinf())
    if exact is not None and exact.dtype is not native.dtype:
        broken |= usual.isinf() & (center == usual) & (got != usual)  # infinite in float64, too: no overflow
    counts = usual.isfinite() & center.isfinite() & got.isfinite() & ~undefined
    unit = spacing(center.nan_to_num(), native.dtype)
    error = torch.where(broken, math.inf, (got - center).abs())
    times = torch.zeros_like(center)
    times[counts] = (error / _rounding(native, center, samples, native.dtype))[counts].nan_to_num(
        math.inf, math.inf
    )
    times[broken] = math.inf
    rms = times[counts].square().mean().sqrt().item() if counts.any() else 0.0
    bad = times > _allowed(limit, 1)
    if not bad.any() and rms <= _allowed(limit, int(counts.sum())):
        return None
    worst = int(times.argmax())
    return Deviation(
        error=error.flatten()[worst].item(),
        reference_error=(usual - center).abs().flatten()[worst].item(),
        ulps=(error / unit).flatten()[worst].item(),
        times=times.max().item(),
        elements=int(bad.sum()) or int((times > limit).sum()),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), times.shape)),
    )


def rounding_multiple(
    native: Tensor, exact: Tensor | None, samples: Sequence[Tensor], candidate: Tensor
) -> float:
    """Measure the error of a result in multiples of the reference's rounding error, as a root mean square over the elements.

    Args:
        native: the reference in its own dtype.
        exact: the reference in float64, where it can be run so.
        samples: the reference with its rounding resampled.
        candidate: the result, of the same shape.

    Returns:
        0 where the candidate has the reference's bits, and for integers and flags.
    """
    if not native.numel() or same_bits(native, candidate) or not candidate.is_floating_point():
        return 0.0
    center = (native if exact is None else exact).double()
    got = candidate.double()
    counts = got.isfinite() & center.isfinite() & native.isfinite()
    if not counts.any():
        return 0.0
    times = (got - center).abs()[counts] / _rounding(native, center, samples, native.dtype)[counts]
    return times.square().mean().sqrt().item()


def _rounding(native: Tensor, center: Tensor, samples: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rounding error of each element of the reference against the exact values, as a root mean square over its runs."""
    distances = [
        (run.double() - center).nan_to_num(math.inf, math.inf, math.inf).square()
        for run in (native, *samples)
    ]
    # A correctly rounded result is off by 1/sqrt(12) of a unit, root mean square.
    unit = spacing(center.nan_to_num(), dtype)
    rounding = (torch.stack(distances).mean(0) + unit.square() / 12).sqrt()
    return rounding.clamp(
        min=torch.finfo(torch.float64).tiny
    )  # the square of float64's smallest unit is zero


def _allowed(limit: float, elements: int) -> float:
    return limit * (1 + 3 / math.sqrt(2 * max(elements, 1)))


def _undefined(native: Tensor, samples: Sequence[Tensor]) -> Tensor:
    """Elements that hold uninitialised memory: NaN with one poison, a number with the other."""
    if not native.is_floating_point() or not samples:
        return torch.zeros(native.shape, dtype=torch.bool, device=native.device)
    return native.isnan() & ~samples[0].isnan()


def _exact_difference(
    native: Tensor,
    exact: Tensor | None,
    samples: Sequence[Tensor],
    candidate: Tensor,
    undefined: Tensor,
    bitwise: bool,
) -> Deviation | None:
    differs = (native != candidate) & ~((native != native) & (candidate != candidate)) & ~undefined
    if bitwise:
        differs |= _other_sign(native, candidate) & ~undefined
    else:
        # A comparison, or an index of a largest element, that rounding alone turns over.
        for other in (*samples, *([exact] if exact is not None and exact.dtype is native.dtype else [])):
            differs &= other == native
    if not differs.any():
        return None
    a, b = candidate.double(), (native if exact is None else exact).double()
    distance = torch.where(differs, (a - b).abs(), 0.0)
    worst = int(torch.where(differs, distance.nan_to_num(math.inf) + 1, 0.0).argmax())
    floating = native.is_floating_point()
    return Deviation(
        error=distance.flatten()[worst].item(),
        reference_error=(native.double() - b).abs().flatten()[worst].item(),
        ulps=(distance / spacing(b.nan_to_num(), native.dtype)).flatten()[worst].item()
        if floating
        else math.inf,
        times=math.inf,
        elements=int(differs.sum()),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), differs.shape)),
    )
