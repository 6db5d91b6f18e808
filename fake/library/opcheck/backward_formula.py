"""Check a backward formula: its values, also for other calls, and other layouts of gradients and inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fake.error_text import describe_error
from fake.library.opcheck.derivatives import (
    Comparison,
    compare_formula,
    in_double,
    is_differentiable,
    jittered,
)
from fake.library.opcheck.free_sizes import plan_sizes
from fake.library.opcheck.result import Evidence, Fault, describe_tensor
from fake.library.opcheck.sample_calls import (
    Call,
    attempt,
    flat_tensors,
    is_permutation,
    named_tensors,
    restride,
)
from fake.library.opcheck.variations import code_constants, number_variations, with_defaults
from fake.library.random_state import seeded_generators
from fake.seam import library as _torch

Gradients = dict[str, torch.Tensor | None]


#: Layouts of gradients, by their names in :func:`fake.library.opcheck.sample_calls.restride`.
_LAYOUTS = {
    "a transposed gradient": "column-major",
    "a gradient with gaps": "with gaps",
    "a gradient with a storage offset": "with a storage offset",
}
_LINEAR_FIX = "a gradient is linear in those of the outputs: multiply by them; do not clamp or round"
_LAYOUT_FIX = (
    "do not assume that gradients are contiguous: index them by size and stride, or call .contiguous()"
)
_INPUT_FIX = "save what the formula needs with ctx.save_for_backward, and index it by size and stride, or call .contiguous()"


@seeded_generators(0)
def check(op: Any, call: Call) -> str:
    """Compare the formula with differences of the operator's values, then with itself.

    The first is done for the sample, for other sizes, numbers and flags, and for repeated indices; in other
    floating-point dtypes, the formula's gradients are compared with those in double precision. The second is
    done for the same gradient values in other layouts, for large and small gradients, for inputs with other
    strides, for one input at a time, and with another call in between. If the sample requires no gradient and
    there is a formula, all inputs that can require one do.

    Raises:
        Fault: a comparison fails.
    """
    tolerances = call.tolerances
    if not any(t.requires_grad for t in call.tensors):
        if not _torch.has_autograd_formula(op) or op._schema.is_mutable:
            return "no input requires a gradient"
        call = call.map(lambda t: t.detach().requires_grad_(is_differentiable(t)))
        claimed = False
    else:
        claimed = True
    reference = _gradients(op, call, lambda g: g, ones=False)
    if isinstance(reference, str):
        return reference
    again = _gradients(op, call, lambda g: g, ones=False)
    if isinstance(again, str) or _difference(reference, again, tolerances):
        return "not deterministic"
    notes: list[str] = []
    if _torch.is_defined_in_python(op):
        notes = _check_values(op, call, claimed)
        _check_dtypes(op, call)
    _check_layouts(op, call, reference, tolerances)
    _check_linear(op, call, reference, tolerances)
    _check_each_input_alone(op, call, reference, tolerances)
    _check_state(op, call, reference, tolerances)
    return "\n".join(notes)


# --- values ----------------------------------------------------------------------------------------
def _calls_to_compare(op: Any, call: Call) -> Iterator[Call]:
    """Yield the calls to compare the formula on: the sample, other signs, other sizes, other numbers."""
    yield call
    yield call.map(
        lambda t: (-t.detach()).requires_grad_(t.requires_grad) if is_differentiable(t) else t,
        "values negated",
        "value",
    )
    whole = with_defaults(op._schema, call)
    needs = [t.requires_grad for t in whole.tensors]

    def with_requires_grad(other: Call) -> Call:
        wanted = dict(zip(map(id, other.tensors), needs, strict=False))
        return other.map(lambda t: t.detach().requires_grad_(wanted.get(id(t), False)))

    _, strings = code_constants(_torch.python_functions_of(op))
    plan = plan_sizes(op, whole)
    # Integers may depend on each other (an order and its inverse), so their tensors keep their sizes.
    numbers = {i for i, t in enumerate(plan.call.tensors) if not is_differentiable(t)}
    free = [f for f in plan.groups if not any(what == "tensor" and n in numbers for what, n, _ in f.sizes)]
    plan = replace(plan, groups=free)
    for other in plan.all_different():
        yield with_requires_grad(other)
    for group, new in itertools.product(plan.groups, (1, 2)):
        for other in plan.at(group, new):
            yield with_requires_grad(other)
    for other in itertools.islice(number_variations(whole, strings), 16):
        # Multiplied by zero, everything is constant: a straight-through formula need not know that.
        zero = any(
            type(new) is float and new == 0 != old
            for old, new in zip(whole.leaves, other.leaves, strict=False)
        )
        if other.kind == "number" and not zero and len(other.tensors) == len(needs):
            yield with_requires_grad(other)
    repeated = _with_repeated_indices(call)
    if repeated is not None:
        yield repeated


def _with_repeated_indices(call: Call) -> Call | None:
    """Repeat integers in pairs in each tensor of them; None if one is a permutation, or all are too short."""
    integers = [
        t
        for t in call.tensors
        if not (is_differentiable(t) or t.dtype is torch.bool) and t.layout is torch.strided
    ]
    if not any(t.numel() > 1 for t in integers):
        return None
    if any(map(is_permutation, integers)):
        return None

    def repeat_in_pairs(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor is one for one in integers) or not tensor.dim():
            return tensor
        at = torch.arange(tensor.shape[-1], device=tensor.device) // 2 * 2
        return tensor.index_select(-1, at)

    return call.map(repeat_in_pairs, "indices that repeat", "value")


# --- types -----------------------------------------------------------------------------------------
_LOWER_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
_RELATIVE_TOLERANCE = 0.05
_ERROR_FACTOR = 8.0
"""In a lower precision, the formula's error in units may be this many times its error in float32."""
_PERTURBATION_FACTOR = 1.0
"""And this many times the effect of moving inputs by a unit: in low precision, ``sin(1000 * x)`` may have
any slope."""


def _check_dtypes(op: Any, call: Call) -> None:
    """Compare gradients in each dtype that the operator accepts with those for the same values in float64."""
    for dtype in _LOWER_PRECISION:
        found = _differences_in_dtype(op, call, dtype)
        # Where a maximum is chosen or a value is rounded, low precision may choose another; next to it, not.
        if found and _differences_in_dtype(op, jittered(call), dtype):
            raise Fault(
                f"the backward formula is another one in {dtype}",
                evidence=found,
                fix="use one formula for all types of floating point, or correct the kernel for this one",
            )


def _differences_in_dtype(op: Any, call: Call, dtype: torch.dtype) -> tuple[Evidence, ...]:
    def cast(to: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t.detach().to(to).requires_grad_(t.requires_grad) if t.is_floating_point() else t

    low = call.map(cast(dtype), f"inputs in {dtype}", "dtype")
    exact = in_double(op, low)
    if exact is low:
        return ()

    def rounded(grad: torch.Tensor) -> torch.Tensor:
        return grad.to(dtype).to(grad.dtype)

    unit = torch.finfo(dtype).eps
    calls = [
        low,
        exact,
        exact.map(cast(torch.float32)),
        *(_perturbed(exact, unit, seed) for seed in range(3)),
    ]
    runs: list[Any] = [_gradients(op, one, rounded, ones=False) for one in calls]
    if any(isinstance(run, str) for run in runs):
        return ()  # this dtype is not supported
    wrong = []
    for name in runs[0]:
        found = [run[name] for run in runs]
        if any(v is None or v.shape != found[0].shape or not v.is_floating_point() for v in found):
            continue
        actual, expected, single, *perturbed = found
        counts = torch.stack([v.isfinite() for v in found]).all(0)
        if not counts.any():
            continue

        def rms(value: torch.Tensor, counts: torch.Tensor = counts) -> float:
            return float(value.double()[counts].square().mean().sqrt())

        # Intermediate results are rounded, too, as if the inputs differed by that much.
        noise = _PERTURBATION_FACTOR * max(rms(value - expected) for value in perturbed)
        if dtype is not torch.float32:
            noise += _ERROR_FACTOR * unit / torch.finfo(torch.float32).eps * rms(single.double() - expected)
        gap = rms(actual.double() - expected)
        if gap > _RELATIVE_TOLERANCE * rms(expected) + noise + 1e-4:
            text = f"{rms(actual):.5g} in the mean, {gap:.3g} off"
            wrong.append(
                Evidence(
                    f"gradient of {name}", f"{rms(expected):.5g} in double precision", text, low.describe()
                )
            )
    return tuple(wrong)


def _perturbed(call: Call, unit: float, seed: int) -> Call:
    """Return the call with each float moved up or down by one unit of a dtype."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        up = torch.rand(tensor.shape, generator=generator).to(tensor.device) < 0.5
        return (tensor.detach() * torch.where(up, 1 + unit, 1 - unit)).requires_grad_(tensor.requires_grad)

    return call.map(move)


def _check_values(op: Any, call: Call, claimed: bool) -> list[str]:
    notes: dict[str, None] = {}
    compared = 0
    for variation in _calls_to_compare(op, call):
        double = in_double(op, variation)
        found = compare_formula(op, double, 2 if variation is call else 1)
        if found is None:
            continue
        suspects = [c for c in found if c.verdict in ("wrong", "no formula", "undecided")]
        if suspects:
            # The sample may be at a kink: a real fault must also show up next to it.
            moved = {c.name: c for c in reversed(compare_formula(op, jittered(double)) or []) if _is_wrong(c)}
            if not moved and variation.kind != "value" and any(c.verdict == "undecided" for c in suspects):
                notes["the operator's values do not decide the gradient of " + suspects[0].name] = None
            _raise_wrong(variation, [moved[c.name] for c in suspects if c.name in moved], claimed)
        compared += 1
        for one in found:
            if one.verdict == "straight-through":
                notes[
                    f"straight-through: the operator is constant in small steps of {one.name}, the formula is not zero"
                ] = None
    return [f"values compared for {compared} calls", *notes]


def _is_wrong(comparison: Comparison) -> bool:
    return comparison.verdict in ("wrong", "no formula")


def _raise_wrong(call: Call, wrong: list[Comparison], claimed: bool) -> None:
    if not claimed:
        wrong = [c for c in wrong if c.verdict != "no formula"]
    if not wrong:
        return
    with_ = "" if call.label == "the sample" else f" with {call.label}"
    evidence = tuple(
        Evidence(
            f"gradient of {c.name}, along a direction",
            f"{c.numeric:.5g}",
            c.text.split(",")[0],
            call.describe(),
        )
        for c in wrong[:1]
    )
    if wrong[0].verdict == "no formula":
        fix = f"return the gradient of {wrong[0].name}; None says that the output does not depend on it"
    elif with_:
        fix = "make the formula use the sizes and numbers of the call (save them in setup_context), not those of one call"
    else:
        fix = (
            "correct the backward formula, or what setup_context saves for it; for a surrogate gradient that differs on "
            "purpose, leave test_gradients out of test_utils"
        )
    raise Fault(
        f"the backward formula's gradient of {wrong[0].name} is not the derivative{with_}",
        evidence=evidence,
        fix=fix,
    )


# --- the formula against itself --------------------------------------------------------------------
def _check_layouts(op: Any, call: Call, reference: Gradients, tolerances: Mapping[str, float]) -> None:
    for label, kind in _LAYOUTS.items():
        found = _gradients(op, call, lambda g, kind=kind: restride(g, kind), ones=False)  # type: ignore[misc]
        _compare(call, reference, found, label, tolerances, _LAYOUT_FIX)
    constant = _gradients(op, call, lambda g: g, ones=True)
    expanded = _gradients(op, call, lambda g: g.new_ones(()).expand(g.shape), ones=True)
    if not isinstance(constant, str):
        label = "an expanded gradient (as .sum() makes)"
        _compare(call, constant, expanded, label, tolerances, _LAYOUT_FIX)
    for label, kind in (("transposed inputs", "column-major"), ("inputs with gaps", "with gaps")):
        changed = call.map(lambda t, kind=kind: restride(t, kind).requires_grad_(t.requires_grad), label)  # type: ignore[misc]
        found = _gradients(op, changed, lambda g: g, ones=False)
        if not isinstance(found, str):  # a kernel may refuse inputs that are not contiguous
            _compare(call, reference, found, label, tolerances, _INPUT_FIX)


def _check_linear(op: Any, call: Call, reference: Gradients, tolerances: Mapping[str, float]) -> None:
    if any(t.dtype is torch.float16 for t in call.tensors):
        return  # it holds neither
    for label, factor in (("a large gradient", 2.0**10), ("a small gradient", 2.0**-20)):
        found = _gradients(op, call, lambda g, factor=factor: g * factor, ones=False)  # type: ignore[misc]
        if not isinstance(found, str):
            found = {name: g if g is None else g / factor for name, g in found.items()}
        _compare(call, reference, found, label, tolerances, _LINEAR_FIX)


def _check_each_input_alone(
    op: Any, call: Call, reference: Gradients, tolerances: Mapping[str, float]
) -> None:
    needing = [t for t in call.tensors if t.requires_grad]
    for one in needing if len(needing) > 1 else ():
        alone = call.map(lambda t, one=one: t.detach().requires_grad_(t is one))  # type: ignore[misc]
        found = _gradients(op, alone, lambda g: g, ones=False)
        if found == "no gradient":
            continue
        names = {n for n, _, t in named_tensors(op._schema, alone) if t.requires_grad}
        expected = {n: g for n, g in reference.items() if n in names}
        label = f"a gradient required by {' and '.join(sorted(names))} only"
        fix = "return one gradient for each argument, in their order, whatever ctx.needs_input_grad says"
        _compare(call, expected, found, label, tolerances, fix)


def _check_state(op: Any, call: Call, reference: Gradients, tolerances: Mapping[str, float]) -> None:
    def other_values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() * 0.5 + 0.25 if is_differentiable(tensor) else tensor.detach()

    def between() -> None:
        attempt(op, call.map(other_values))
        grads = call.map(lambda t: other_values(t).requires_grad_(t.requires_grad))
        attempt(op, grads)

    found = _gradients(op, call, lambda g: g, ones=False, between=between)
    label = "another call of the operator between forward and backward"
    fix = "keep what the formula needs on ctx, not in variables that outlive the call"
    _compare(call, reference, found, label, tolerances, fix)


def _gradients(
    op: Any,
    call: Call,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    ones: bool,
    between: Callable[[], None] = lambda: None,
) -> Gradients | str:
    """Return the gradients of all inputs that require one, for random or constant ones in a given layout."""

    def run(*args: Any, **kwargs: Any) -> Gradients:
        inner = Call(args, kwargs)
        named = [(n, t) for n, _, t in named_tensors(op._schema, inner) if t.requires_grad]
        result = op(*args, **kwargs)
        between()
        outputs = [o for o in flat_tensors(result) if o.requires_grad]
        generator = torch.Generator().manual_seed(1)
        grads = []
        for output in outputs:
            values = torch.ones(output.shape) if ones else torch.randn(output.shape, generator=generator)
            grads.append(change(values.to(output.device, output.dtype)))
        found = torch.autograd.grad(outputs, [t for _, t in named], grads, allow_unused=True)
        return {n: g for (n, _), g in zip(named, found, strict=True)}

    outcome = attempt(run, call)
    if outcome.error is not None:
        return describe_error(outcome.error)
    if not outcome.value:
        return "no gradient"
    return outcome.value


def _difference(left: Gradients, right: Gradients, tolerances: Mapping[str, float]) -> tuple[Evidence, ...]:
    wrong = []
    for name, a in left.items():
        b = right[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(Evidence(f"gradient of {name}", str(a), str(b)))
        elif a.shape != b.shape:
            wrong.append(Evidence(f"gradient of {name}", describe_tensor(a), describe_tensor(b)))
        elif not torch.allclose(a, b, equal_nan=True, **(tolerances or {"rtol": 1e-3, "atol": 1e-4})):
            gap = float((a - b).abs().max())
            wrong.append(
                Evidence(f"gradient of {name}", "the same values", f"values that differ by up to {gap:.3g}")
            )
    return tuple(wrong)


def _compare(
    call: Call,
    reference: Gradients,
    actual: Gradients | str,
    label: str,
    tolerances: Mapping[str, float],
    fix: str,
) -> None:
    if isinstance(actual, str):
        evidence: tuple[Evidence, ...] = (Evidence("backward", "gradients", actual, call.describe()),)
    else:
        evidence = _difference(reference, actual, tolerances)
    if evidence:
        raise Fault(f"the backward formula is wrong with {label}", evidence=evidence, fix=fix)
