"""Find fake kernels that are right only for the sample: compare on other calls that the kernel accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fake.error_text import describe_error
from fake.library.opcheck.comparison import compare, fix_for, run_real, try_fake
from fake.library.opcheck.free_sizes import SizePlan, plan_sizes
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call
from fake.library.opcheck.variations import (
    code_constants,
    dtype_variations,
    joint_size_variations,
    layout_variations,
    number_variations,
    value_variations,
    with_defaults,
    with_equal_lists,
)
from fake.seam import library as _torch


def check(op: Any, call: Call, *, layouts: bool = True) -> str:
    """Compare for other sizes, values, numbers, lists, storage offsets, strides and dtypes.

    Inputs that the real kernel refuses are skipped; the note names the sizes that it keeps fixed.

    Args:
        op: the overload to check.
        call: the sample.
        layouts: False skips strides and dtypes, and keeps index tensors in the shape of what they index if
            they have that shape in the sample. This is the default for operators of other libraries.

    Raises:
        Fault: the real kernel accepts a variation, and the fake kernel fails or gives another answer.
    """
    if try_fake(op, call.detached()).error is not None:
        return "no fake kernel that works on the sample"
    if not _torch.is_defined_in_python(op):
        return _try_all(op, joint_size_variations(call)) + "; sizes that are equal changed together only"
    call = with_defaults(op._schema, call.detached())
    plan = plan_sizes(op, call, tied=not layouts)
    note = _try_all(op, _variations(op, call, plan, layouts=layouts))
    fixed = [f"{place}: {reason}" for place, reason in plan.fixed_sizes.items()]
    return "\n".join([note, *(f"not varied: {text}" for text in fixed)])


def _variations(op: Any, call: Call, plan: SizePlan, *, layouts: bool) -> Iterator[Call]:
    numbers, strings = code_constants(_torch.python_functions_of(op))
    parts = [plan.calls(numbers), value_variations(call), number_variations(call, strings)]
    other = next(plan.all_different(), None)
    if other is not None:
        parts.append(number_variations(other, strings))
    equal = with_equal_lists(call)
    if equal is not None:
        parts.append(number_variations(equal, strings))
    if layouts:
        parts += [layout_variations(call), dtype_variations(call)]
        if other is not None:
            parts += [layout_variations(other), dtype_variations(other)]
    return itertools.chain(*parts)


def _try_all(op: Any, variations: Iterator[Call]) -> str:
    ran = 0
    for variation in variations:
        real = run_real(op, variation)
        if real.error is not None:
            continue
        fake = try_fake(op, variation)
        if fake.error is None:
            evidence = compare(variation, real.value, fake.value)
        elif isinstance(fake.error, (*_torch.MISSING_FAKE_KERNEL_ERRORS, NotImplementedError)):
            continue
        else:
            said = describe_error(fake.error)
            inputs = f"{variation.label}: {variation.describe()}"
            evidence = [Evidence("fake kernel", "an answer", said, inputs, "error")]
        ran += 1
        if evidence:
            raise Fault(
                f"the fake kernel is right for the sample but wrong with {variation.label}",
                evidence=tuple(evidence),
                fix=fix_for(evidence[0], variation),
            )
    return f"{ran} variations"
