"""Rounding: how far a result is from float64, and whether a rewrite is farther than rounding explains.

The only tolerance is how many times as far off a result may be. The yardstick is the largest of three: the
error of correct results, correct rounding, and what half a unit in the last place of the *inputs* does to the
result, which no computation can avoid. A result that is right by luck is allowed what it loses on nearby
inputs, or if each of its calls rounds in a random direction. Both sides of a window run on the same inputs in
their own dtypes, and the graph before in float64, so that a loss is measured where it happens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.computing_types import (
    computing_dtype,
    effective_dtype,
    finest_dtype,
    is_arithmetic,
    is_elementwise,
    is_transcendental,
)
from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.execution.fused_kernels import has_kernels, recompute_by_definition
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import RUN_ERRORS, DefinedRun, ExactRun, Run
from fxpasses.errors import Location
from fxpasses.graphs.numbers import became, computable
from fxpasses.graphs.provenance import locate
from fxpasses.graphs.rewriting import outputs_of, value_of

LIMIT = 8.0
"""How many times as far off a rewrite may be, as a root mean square over a tensor.

Correct ones were at most 5 times as far: for example, a matmul in bfloat16 whose inner dimension is split
into 64 parts. A sum of 256 that is accumulated in bfloat16 is 8 to 14 times as far, of 1,024 up to 180 times.
"""
PROGRAM_LIMIT = 16.0
"""The same for a whole program, or for Inductor: at most 6 times as far in 1,080 small models with GELU."""
EXACT = 2.0**53
"""A result this many times as far off should be an exact zero, whose rounding is no yardstick."""


_SEED = 20
_PERTURBATIONS = 2
_NEARBY = 4
_FEW_CALLS, _DRAWS = 64, 16
"""How often small computations are perturbed: one draw may move hardly anything, or keep a near tie."""
_DISCRETE_ULPS = 32.0
"""Twice the units in the last place of inputs by which compared values may be moved."""
_LIBRARY_ULPS = 8.0
"""Twice the error in ulps of a library's exponential or error function. Low-precision ones round once."""
_POWERS = 8
"""Elements within this many powers of two of each other are judged together."""
_SMALLEST = 32
"""Powers of two below the largest element. Smaller ones may be what float64 leaves of a sum that cancels."""
_SMALLEST_PER_ELEMENT = 96
"""The same if each element is computed on its own."""
_FEWEST = 4


@dataclass(frozen=True)
class Distance:
    """The distance of a result from float64.

    Attributes:
        times: as a multiple of what is unavoidable; infinite for an integer, or a value that is no longer
            finite.
        before: root mean square distance of the correct result from float64.
        after: the same for the result.
        ulps: ``after`` in units in the last place of the largest value.
        element: where the result is farthest off.
        values: the correct value there, and the result.
        where: the call that loses precision, and the user's line, if known.
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
        most = f"{where}{became(*self.values)}"
        if self.times > EXACT:
            return most
        return (
            f"off by {self.after:.3g} from float64 in the mean ({self.ulps:.3g} ulp), {self.times:.3g} times as far "
            f"as rounding takes it (before: {self.before:.3g}); most at {most}"
            + (self.where and f"; digits are lost at {self.where}")
        )


def distance(
    usual: Tensor, result: Tensor, wide: Sequence[Tensor], mask: Tensor | None = None
) -> Distance | None:
    """Measure how far a result is from float64.

    Args:
        usual: the correct result, except for rounding.
        result: the result to judge, with the same shape and dtype.
        wide: the correct result in float64, then for inputs that differ by up to half a unit. If there is no
            float64, ``usual`` and the same for inputs that differ by a unit.
        mask: the elements of floats whose rounding to measure; all if None.

    Returns:
        ``None`` if the result has the bits of the usual one, or is as right as any can be.
    """
    if not usual.numel() or same_bits(usual, result):
        return None
    wide = [value for value in wide if value.shape == usual.shape]
    if usual.is_complex():
        real = [torch.view_as_real(value.resolve_conj()) for value in (usual, result, *wide)]
        return distance(real[0], real[1], real[2:])
    if not usual.is_floating_point():
        wrong = usual != result
        for other in wide:  # for example an argmax that rounding alone changes
            wrong &= other == usual
        return first_wrong_element(usual, result, wrong)
    center, got = (wide[0] if wide else usual).double(), result.double()
    broken = usual.isfinite() & ~got.isfinite()
    broken |= (
        ~usual.isfinite()
        & (_nonfinite_kind(usual) == _nonfinite_kind(center))
        & (_nonfinite_kind(got) != _nonfinite_kind(center))
    )
    if broken.any():
        return first_wrong_element(usual, result, broken)
    known = center.isfinite() & usual.isfinite() & got.isfinite()
    for run in wide:
        known &= run.isfinite()
    if mask is not None:
        known &= mask
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


def largest_error(exact: Tensor, value: Tensor) -> float:
    """Return the largest distance from the exact values; 0 for integers and flags."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    if value.is_complex():
        exact, value = torch.view_as_real(exact.resolve_conj()), torch.view_as_real(value.resolve_conj())
    center, got = exact.double(), value.double()
    known = center.isfinite()
    return (got - center)[known].abs().nan_to_num(math.inf).max().item() if known.any() else 0.0


def first_wrong_element(usual: Tensor, result: Tensor, wrong: Tensor) -> Distance | None:
    """Report the first wrong element, as infinitely far off. Args: what is right, the result, where wrong."""
    if not wrong.any():
        return None
    at = _index(wrong.double())
    return Distance(math.inf, 0.0, math.inf, math.inf, at, (usual[at].item(), result[at].item()))


def _index(value: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(value.flatten().argmax().cpu(), value.shape))


def _nonfinite_kind(value: Tensor) -> Tensor:
    """0 for finite elements, else the kind of non-finite value."""
    return torch.nan_to_num(value.double(), nan=9.0, posinf=1.0, neginf=-1.0) * ~value.isfinite()


def same_bits(a: Tensor, b: Tensor, signs: bool = False) -> bool:
    """Whether two tensors are equal, NaN to NaN.

    Args:
        a: a tensor.
        b: one of the same shape and dtype.
        signs: whether zeros must have the same sign, too.
    """
    if signs and bool(other_sign(a, b).any()):
        return False
    a, b = computable(a), computable(b)
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def other_sign(a: Tensor, b: Tensor) -> Tensor:
    """Where one of two equal numbers is 0.0 and the other is -0.0."""
    a, b = computable(a), computable(b)
    if a.is_complex():
        return other_sign(*(torch.view_as_real(value.resolve_conj()) for value in (a, b))).any(-1)
    if not a.is_floating_point():
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    return (a == 0) & (b == 0) & (a.signbit() != b.signbit())


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from each (float64) value to the next one of ``dtype``: one unit in the last place.

    >>> spacing(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), torch.bfloat16)[:2]
    tensor([0.0078, 0.0156], dtype=torch.float64)
    """
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(info.smallest_normal, info.max)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent)


def perturbed_in_dtype(inputs: Sequence[Any], seed: int, units: float = 2.0) -> list[Any]:
    """Move each element by up to a unit in the last place, in its own dtype. Args: those of :func:`perturbed`."""
    wide = perturbed(inputs, seed, units=units)
    return [m.to(v.dtype) if isinstance(v, Tensor) else m for m, v in zip(wide, inputs, strict=True)]


def perturbed(
    inputs: Sequence[Any], seed: int, dtype: torch.dtype | None = None, units: float = 1.0
) -> list[Any]:
    """Return inputs in float64, each element moved by up to half a unit in the last place.

    In units of float64, it is moved by a whole one.

    Args:
        inputs: of a graph. Anything but floating tensors is kept.
        seed: of the amounts.
        dtype: the dtype of the units; each input's own if None.
        units: by up to half of this many units instead.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_complex():
            return torch.view_as_complex(one(torch.view_as_real(value.detach().resolve_conj())))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        wide = value.detach().double()
        amount = torch.rand(wide.shape, generator=generator, dtype=torch.float64).to(wide.device) - 0.5
        unit = spacing(wide.nan_to_num(), dtype or value.dtype)
        if (dtype or value.dtype) is torch.float64:  # less than a unit has no effect
            amount = amount.sign()
        return torch.where(wide.isfinite() & (wide != 0), wide + amount * units * unit, wide)

    return [one(value) for value in inputs]


def less_precise(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Any],
    limit: float = LIMIT,
    chosen: bool = False,
) -> dict[int, Distance]:
    """Return the results that lose too much precision, by position; infinitely so if no longer finite.

    Args:
        before: the graph before, or its side of a window.
        after: the same function.
        inputs: of both.
        limit: how many times as far off they may be.
        chosen: whether the inputs were chosen for what they lose. Then a third of a result's digits must be
            lost: correct programs that hardly differ lose a few on some inputs, such as attention with scores
            in the hundreds.
    """
    usual, got = _run(before, inputs), _run(after, inputs)
    exact = ExactRun(before).results(inputs)
    if usual is None or got is None or exact is None:
        return {}
    found: dict[int, Distance] = {}
    runs, defined = _Runs(before, inputs), None
    tie_dependent = functools.cache(lambda: tie_dependent_outputs(before, inputs, after))
    finest = functools.cache(lambda dtype: finest_dtype(before, dtype))
    lost_at = functools.cache(lambda dtype: str(_digits_lost_at(after, inputs, dtype)))
    is_per_element, returned = all(map(is_elementwise, (before, after))), outputs_of(before.graph)
    for position, (mine, theirs, center) in enumerate(zip(usual, got, exact, strict=False)):
        if _discrete_differ(mine, theirs) and position not in tie_dependent():
            how = _discrete_distance(before, inputs, position, (mine, theirs, center))
            found |= {position: how} if how is not None else {}
        if (
            not _are_comparable_floats(mine, theirs, center)
            or torch.equal(mine, theirs)
            or position in tie_dependent()
        ):
            continue
        kind = effective_dtype(returned[position], mine.dtype)
        mine, theirs = mine.to(kind), theirs.to(kind)
        # If values are only moved, their rounding is that of the inputs, and may happen once more.
        is_rounded = not torch.equal(mine.double(), center.double())
        dtype = finest(kind) if is_rounded else computing_dtype(before)
        several = [runs.perturbed(seed, dtype) for seed in range(_PERTURBATIONS)]
        others = [run[position] for run in several if run is not None]
        for part in _by_magnitude(center, kind, is_per_element):
            how = distance(mine, theirs, [center, *others], part)
            if how is not None and limit < how.times < math.inf:
                for error in runs.errors(position, center, part):
                    how = replace(how, times=min(how.times, how.after / error)) if error else how
                    if how.times <= limit:
                        break
            if how is not None and how.times > limit and has_kernels(after):
                defined = defined or _run(after, inputs, DefinedRun)
                less = distance(mine, defined[position].to(kind), [center, *others], part) if defined else how
                how = less if less is None or less.times <= limit else how
            if how is not None and how.times > limit and not (chosen and _is_small_loss(how, kind)):
                found[position] = replace(how, where=lost_at(dtype))
                break
    return found


def _is_small_loss(how: Distance, dtype: torch.dtype) -> bool:
    """Whether less than a third of the digits are lost."""
    return how.ulps < torch.finfo(dtype).eps ** (-1 / 3)


def _discrete_differ(mine: Any, theirs: Any) -> bool:
    """Whether two results of integers or flags differ."""
    both = [value for value in (mine, theirs) if isinstance(value, Tensor)]
    if len(both) < 2 or mine.shape != theirs.shape or mine.is_floating_point() or mine.is_complex():
        return False
    return not torch.equal(mine, theirs)


def _discrete_distance(
    before: fx.GraphModule, inputs: Sequence[Any], position: int, values: Sequence[Tensor]
) -> Distance | None:
    """Integers and flags that no longer are as in float64, unless rounding of the inputs explains it."""
    mine, theirs, center = values
    wrong = (mine == center) & (theirs != center)
    kinds = [v.dtype for v in map(value_of, before.graph.nodes) if isinstance(v, Tensor)]
    coarsest = max(filter(_is_float, kinds), key=lambda kind: torch.finfo(kind).eps, default=None)
    for seed in range(_NEARBY if bool(wrong.any()) else 0):
        run = ExactRun(before).results(perturbed(inputs, seed, coarsest, units=_DISCRETE_ULPS))
        wrong &= torch.ones_like(wrong) if run is None else run[position] == center
    how = first_wrong_element(mine, theirs, wrong)
    return None if how is None else replace(how, times=2 * EXACT)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _digits_lost_at(gm: fx.GraphModule, inputs: Sequence[Any], dtype: torch.dtype | None) -> Location:
    """Locate the call whose result is off by the most, compared with its inputs."""
    own, wide = Run(gm, keep=True), ExactRun(gm, keep=True)
    own(cloned(inputs), _SEED)
    wide.results(inputs)  # as far as it runs
    off: dict[fx.Node, float] = {}
    worst, most = Location(), 0.0
    for node in gm.graph.nodes:
        value, exact = own.values.get(node.name), wide.values.get(node.name)
        if exact is None or not isinstance(value, Tensor) or not _are_comparable_floats(value, exact):
            continue
        exact = computable(exact)
        units = ((value.double() - exact) / spacing(exact.nan_to_num(), dtype or value.dtype))[exact != 0]
        units = units[units.isfinite()]
        off[node] = units.square().mean().sqrt().item() if units.numel() else 0.0
        times = off[node] / max([1.0, *(off.get(given, 0.0) for given in node.all_input_nodes)])
        if times > most and node.op == "call_function":
            worst, most = locate(node), times
    return worst


def _by_magnitude(center: Tensor, dtype: torch.dtype, is_per_element: bool) -> Iterator[Tensor]:
    """All elements of a result, then those of each magnitude: a few large ones hide what others lose.

    Low-precision results are not split: their small elements have few digits in any case.
    """
    yield torch.ones_like(center, dtype=torch.bool)
    if torch.finfo(dtype).bits < 32:
        return
    size = center.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = size.max() if size.numel() else 0.0
    smallest, fewest = (_SMALLEST_PER_ELEMENT, 1) if is_per_element else (_SMALLEST, _FEWEST)
    for power in range(0, smallest, _POWERS):
        part = (size <= largest * 2.0**-power) & (size > largest * 2.0 ** -(power + _POWERS))
        if int(part.sum()) >= fewest:
            yield part


class RandomRoundingRun(ExactRun):
    """A run in float64 that rounds each call in a random direction.

    By up to half a unit in the last place of the dtype, or by a whole one of float64.

    Args:
        gm: the graph.
        seed: of the directions.
        dtype: the dtype of the units; that of each value in the graph if None.
    """

    def __init__(self, gm: fx.GraphModule, seed: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(gm)
        self._seed, self._dtype = seed * 1_000_000, dtype

    def _evaluate(self, n: fx.Node) -> Any:
        result, held = super()._evaluate(n), value_of(n)
        if isinstance(held, (tuple, list)) and held and isinstance(held[0], Tensor):
            return recompute_by_definition(
                n.target,
                *self.fetch_args_kwargs_from_env(n),
                result,
                lambda step: self._moved(step, held[0].dtype),
            )
        if not is_arithmetic(n.target) or not (
            _are_comparable_floats(result) and _are_comparable_floats(held)
        ):
            return result  # sizes are not compared: those of the graph may be symbolic
        is_rough = is_transcendental(n.target) and self._dtype is None and held.dtype is torch.float32
        return self._moved(result, held.dtype, _LIBRARY_ULPS if is_rough else 1.0)

    def _moved(self, value: Tensor, dtype: torch.dtype, units: float = 1.0) -> Tensor:
        self._seed += 1
        (moved_by,) = perturbed([value], self._seed, self._dtype or dtype, units)
        return moved_by


class _Runs:
    """Results of a graph on nearby inputs in both precisions, and randomly rounded. Each run is cached.

    Args:
        gm: the graph.
        inputs: the inputs that the others are near.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._gm = gm
        self.perturbed = functools.cache(
            lambda seed, dtype: ExactRun(gm).results(perturbed(inputs, seed, dtype))
        )
        self._near = functools.cache(lambda seed: perturbed_in_dtype(inputs, seed, units=16.0))
        self._usual = functools.cache(lambda seed: _run(gm, self._near(seed)))
        self._exact = functools.cache(lambda seed: ExactRun(gm).results(self._near(seed)))
        self._at_random = functools.cache(lambda seed: RandomRoundingRun(gm, seed).results(inputs))

    def errors(self, position: int, center: Tensor, part: Tensor) -> Iterator[float]:
        """Yield how far off a part of a result is.

        On inputs a few units away, since on one element it may be right by luck. And if each call rounds in a
        random direction, since terms may cancel by luck.

        Args:
            position: of the result.
            center: the result in float64.
            part: which of its elements count.

        Source: D. S. Parker, Monte Carlo Arithmetic (1997).
        """
        for seed in range(_NEARBY):
            usual, exact = self._usual(seed), self._exact(seed)
            if usual is not None and exact is not None:
                yield from _rms(usual[position].double() - exact[position].double(), part)
        is_small = len(self._gm.graph.nodes) <= _FEW_CALLS or int(part.sum()) <= _FEW_CALLS
        for seed in range(_DRAWS if is_small else _PERTURBATIONS):
            results = self._at_random(seed)
            if results is not None:
                yield from _rms(results[position] - center, part)


def _rms(off: Tensor, part: Tensor) -> Iterator[float]:
    off = off[part]
    off = off[off.isfinite()]
    if off.numel():
        yield off.square().mean().sqrt().item()


def _run(gm: fx.GraphModule, inputs: Sequence[Any], how: type[Run] = Run) -> list[Any] | None:
    try:
        return how(gm)(cloned(inputs), _SEED)
    except RUN_ERRORS:
        return None


def _are_comparable_floats(*values: Any) -> bool:
    return all(isinstance(v, Tensor) and v.is_floating_point() and v.shape == values[0].shape for v in values)
