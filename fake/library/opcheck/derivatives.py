"""Compare a backward formula with differences of the operator's own values.

Along a random direction, ``(f(x + h v) - f(x - h v)) / 2h`` must equal the formula's derivative. The step
``h`` is chosen by comparing the two sides: where they disagree (at a kink, or in a kernel that rounds),
nothing is concluded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors, named_tensors

_FINE_TOLERANCE = 1e-5
_FINE_STEPS = (3e-6, 1e-5, 3e-5, 1e-4)
_FINER_STEPS = (1e-6, 1e-7, 1e-8)
"""For steep functions the other steps are too long: a formula that agrees at one of these is right."""
#: dtype → steps to try, and the relative tolerance of the comparison.
_STEPS: dict[torch.dtype, tuple[tuple[float, ...], float]] = {
    torch.float64: ((1e-5, 1e-3, 1e-2), 2e-3),
    torch.float32: ((1e-2, 3e-2), 3e-2),
    torch.float16: ((1e-1,), 2e-1),
    torch.bfloat16: ((2e-1,), 3e-1),
}


@dataclass(frozen=True)
class Comparison:
    """One input's derivative along one direction.

    Attributes:
        verdict: "right", "wrong", "undecided" (the differences do not converge), "straight-through" (the
            operator is constant in small steps, but the formula is not zero), or "no formula" (None, although
            the output depends on the input).
    """

    name: str
    verdict: str
    formula: float = 0.0
    numeric: float = 0.0

    @property
    def text(self) -> str:
        """Both values, as text."""
        return f"{self.formula:.5g} from the formula, {self.numeric:.5g} from differences of the operator's values"


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can have a gradient."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided


def in_double(op: Any, call: Call) -> Call:
    """Return the call in double precision if the operator supports it, otherwise the call itself."""
    wide = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
    wide[torch.complex64] = torch.complex128

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(wide.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)

    double = call.map(widen)
    outcome = attempt(op, double)
    if outcome.error is not None:
        return call
    narrow = any(is_differentiable(t) and t.dtype in wide for t in flat_tensors(outcome.value))
    return call if narrow else double


def jittered(call: Call) -> Call:
    """Move the call's inputs a little, away from kinks of the operator that the sample may be at."""
    generator = torch.Generator().manual_seed(3)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not is_differentiable(tensor):
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=_real_dtype(tensor.dtype))
        moved = tensor.detach() + 0.05 * (tensor.detach().abs() + 0.1) * noise.to(tensor.device)
        return moved.to(tensor.dtype).requires_grad_(tensor.requires_grad)

    return call.map(move)


def compare_formula(op: Any, call: Call, directions: int = 2) -> list[Comparison] | None:
    """Judge the formula for each output and each input that requires a gradient; None if the call fails.

    Args:
        op: the overload to check.
        call: the arguments, some of which require a gradient.
        directions: the number of random directions for each pair of input and output.
    """
    torch_inputs = [(n, t) for n, _, t in named_tensors(op._schema, call) if t.requires_grad]
    first = attempt(op, call)
    if first.error is not None:
        return None
    outputs = [i for i, o in enumerate(flat_tensors(first.value)) if o.requires_grad]
    found = []
    for output in outputs:
        cotangent = _random_like(flat_tensors(first.value)[output], 11 + output)
        gradients = _gradients(op, call, output, cotangent)
        if gradients is None:
            return None
        for index, (name, tensor) in enumerate(torch_inputs):
            if name in {n for n, _ in torch_inputs[:index]} or not tensor.numel():
                continue
            of = f"{name}" if len(outputs) == 1 else f"{name} (from output {output})"
            found += [
                _compare_along(op, call, index, of, output, cotangent, gradients[index], seed)
                for seed in range(directions)
            ]
    return found


def _random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)


def _signs_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).double() * 2 - 1
    if tensor.is_complex():
        signs = signs * (0.6 + 0.8j if seed else 1.0)
    return signs.to(tensor.device, tensor.dtype)


def _gradients(op: Any, call: Call, output: int, cotangent: torch.Tensor) -> list[torch.Tensor | None] | None:
    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor | None]:
        inputs = [t for _, _, t in named_tensors(op._schema, Call(args, kwargs)) if t.requires_grad]
        result = flat_tensors(op(*args, **kwargs))[output]
        return list(torch.autograd.grad([result], inputs, [cotangent], allow_unused=True))

    return attempt(run, call).value


def _compare_along(
    op: Any,
    call: Call,
    index: int,
    name: str,
    output: int,
    cotangent: torch.Tensor,
    gradient: torch.Tensor | None,
    seed: int,
) -> Comparison:
    """Compare the formula with finite differences of one output along one direction of one input.

    Steps get larger until the differences are smooth. If the operator has a kink there, or is constant, the
    comparison stays undecided, or says so.
    """
    tensor = [t for _, _, t in named_tensors(op._schema, call) if t.requires_grad][index].detach()
    direction = _signs_like(tensor, seed)
    scale = max(float(tensor.abs().mean()), 0.1) if tensor.numel() else 1.0
    steps, tolerance = _STEPS[_real_dtype(tensor.dtype)]

    @functools.cache
    def value(step: float) -> float | None:
        moved = tensor + step * direction
        shifted = _with_input(op, call, index, moved)
        outcome = attempt(op, shifted)
        found = flat_tensors(outcome.value)
        if outcome.error is not None or len(found) <= output or found[output].shape != cotangent.shape:
            return None
        wide = torch.complex128 if cotangent.is_complex() else torch.float64
        return float((found[output].detach().to(wide) * cotangent.conj().to(wide)).sum().real)

    grad_norm = 0.0 if gradient is None else float(gradient.abs().double().pow(2).sum().sqrt())
    analytic = 0.0 if gradient is None else float((gradient.conj() * direction).sum().real)
    undecided = Comparison(name, "undecided", analytic)
    center = value(0.0)
    if center is None or not torch.isfinite(torch.tensor([center, analytic, grad_norm])).all():
        return undecided
    constant = 0
    previous: float | None = None
    for step in (relative * scale for relative in steps):
        if value(step) == value(-step) == center:
            constant += 1
            continue
        slope = _smooth_slope(value, step, grad_norm)
        if slope is None:
            continue
        numeric, norm, difference = slope
        if constant and (previous is None or abs(previous - numeric) > 0.05 * norm):
            # Constant in smaller steps: it rounds inside, or is a step function. Another step must agree.
            previous = numeric
            continue
        if gradient is None:
            moves = abs(numeric) > 1e-6 * float(cotangent.abs().double().sum())
            return Comparison(name, "no formula" if moves else "right", 0.0, numeric)
        wrong = abs(numeric - analytic) > tolerance * norm + 4 * difference
        if tensor.dtype is torch.float64 and wrong:
            found = _slopes(value, scale, _FINER_STEPS)
            wrong = all(abs(one - analytic) > tolerance * norm for one in found)
        elif tensor.dtype is torch.float64 and abs(numeric - analytic) > _FINE_TOLERANCE * norm:
            wrong = _differs_in_double(analytic, _slopes(value, scale, _FINE_STEPS))
        return Comparison(name, "wrong" if wrong else "right", analytic, numeric)
    if not constant:
        return undecided
    if abs(analytic) <= tolerance * grad_norm:  # the formula agrees: along this direction its terms cancel
        return Comparison(name, "right", analytic, 0.0)
    moves = any(v is not None and v != center for v in (value(10 * scale), value(-10 * scale)))
    return Comparison(name, "straight-through" if moves else "wrong", analytic, 0.0)


def _smooth_slope(
    value: Callable[[float], float | None], step: float, grad_norm: float
) -> tuple[float, float, float] | None:
    """The slope from differences over half a step; ``None`` at a kink, or where there is no value.

    Args:
        value: along a line.
        step: the whole step.
        grad_norm: of the formula's gradient.

    Returns:
        The slope, the size to compare differences with, and how far the slope over the whole step is off.
    """
    center, *values = value(0.0), value(step), value(-step), value(step / 2), value(-step / 2)
    if center is None or None in values:
        return None
    up, down, half_up, half_down = (one for one in values if one is not None)
    numeric = (half_up - half_down) / step
    norm = max(grad_norm, abs(numeric))
    difference = abs((up - down) / (2 * step) - numeric)
    whole = abs((up - center) - (center - down)) / step
    half = abs((half_up - center) - (center - half_down)) / step
    # For a smooth function the gap between the two sides shrinks with the step; at a kink it stays.
    is_kink = 2 * half > 0.05 * norm and whole - half < 0.3 * half
    return None if not norm < math.inf or difference > 0.02 * norm or is_kink else (numeric, norm, difference)


def _slopes(value: Callable[[float], float | None], scale: float, steps: Sequence[float]) -> list[float]:
    """The slopes from differences over these steps, times ``scale``."""
    sides = [(value(step * scale), value(-step * scale), step * scale) for step in steps]
    return [(up - down) / (2 * h) for up, down, h in sides if up is not None and down is not None]


def _differs_in_double(analytic: float, found: list[float]) -> bool:
    """Return whether differences for several steps agree with each other far better than with the formula:
    then the kernel itself computes in double precision."""
    spread = max(found, default=0.0) - min(found, default=0.0)
    return len(found) > 1 and all(abs(one - analytic) > 8 * spread for one in found)


def _with_input(op: Any, call: Call, index: int, moved: torch.Tensor) -> Call:
    """Return the call without autograd, with another tensor for one of the inputs that require a gradient."""
    old = [t for _, _, t in named_tensors(op._schema, call) if t.requires_grad][index]
    return call.map(lambda t: moved if t is old else t.detach())
