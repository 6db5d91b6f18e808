"""Check the real kernel for other calls than the sample: mutations, memory of results, effect of strides."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from fake.library.opcheck.call_memory import OWN_MEMORY_FIX, compare_memory, same_values
from fake.library.opcheck.free_sizes import plan_sizes
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors
from fake.library.opcheck.variations import (
    dtype_variations,
    layout_variations,
    number_variations,
    value_variations,
    with_defaults,
)
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """Check variations of the call for hidden mutation, shared memory and values that depend on strides.

    Only for operators defined in Python: other kernels may read past the end of unexpected inputs.

    Raises:
        Fault: for a variation, the kernel does something that its schema does not declare, returns memory
            that it returned before, or returns other values for the same values with other strides.
    """
    tolerances = call.tolerances
    if not _torch.is_defined_in_python(op):
        return "not tried: C++ defines the operator"
    call = with_defaults(op._schema, call.detached())
    _check_results_not_shared(op, call)
    layouts = list(layout_variations(call))
    others = itertools.chain(
        value_variations(call),
        dtype_variations(call),
        number_variations(call),
        plan_sizes(op, call).all_different(),
    )
    ran = 0
    for variation in itertools.chain(layouts, others):
        problem = compare_memory(op, variation)
        if problem is None:
            continue
        ran += 1
        if problem.text:
            raise Fault(f"{problem.text}, with {variation.label}", evidence=problem.evidence, fix=problem.fix)
    offset = next(v for v in value_variations(call) if v.kind == "layout")
    for variation in (offset, *layouts):
        _check_values(op, variation, tolerances)
    return f"{ran} variations"


def _check_results_not_shared(op: Any, call: Call) -> None:
    """Check that a call does not return (and overwrite) the memory that an earlier call returned."""
    if any(r.alias_info is not None for r in op._schema.returns):
        return
    first = attempt(op, call)
    second = attempt(op, call)
    held = {_torch.storage_of(t) for t in flat_tensors(first.value) if t.numel()} - {None}
    for index, output in enumerate(flat_tensors(second.value)):
        if output.numel() and _torch.storage_of(output) in held:
            raise Fault(
                f"two calls returned the same memory as output {index}",
                evidence=(Evidence(f"output {index}", "new memory", "memory that an earlier call returned"),),
                fix=OWN_MEMORY_FIX,
            )


def _check_values(op: Any, call: Call, tolerances: Mapping[str, float]) -> None:
    """Compare outputs and mutated arguments with those for the same values in row-major order."""
    copied = call.copy()
    plain = call.map(lambda t: t.detach().clone(memory_format=torch.contiguous_format))

    def run(call: Call, seed: int = 0) -> list[torch.Tensor] | None:
        outcome = attempt(lambda *a, **k: (op(*a, **k), a, k), call, seed)
        return None if outcome.error is not None else flat_tensors(outcome.value)

    expected, again, actual = run(plain), run(plain, seed=1), run(copied)
    if expected is None or again is None or actual is None or len(expected) != len(actual):
        return
    if not all(same_values(a, b, tolerances) for a, b in zip(expected, again, strict=True)):
        return
    count = len(expected) - len(flat_tensors((call.args, call.kwargs)))
    for index, (mine, theirs) in enumerate(zip(expected, actual, strict=True)):
        # A tensor whose elements share memory cannot hold everything that was written to them.
        if index >= count and call.label.endswith("expanded"):
            return
        if mine.shape == theirs.shape and not same_values(mine, theirs, tolerances):
            where = f"output {index}" if index < count else f"argument {call.tensor_names()[index - count]}"
            raise Fault(
                f"the kernel computes other values with {call.label}",
                evidence=(
                    Evidence(
                        where, "the values for the same inputs in row-major order", "others", call.describe()
                    ),
                ),
                fix="have the kernel use strides and storage offsets, or call .contiguous() on its inputs first",
            )
