"""Fake kernels that are right only for the sample: the same comparison for other sizes, strides, dtypes and values."""

from __future__ import annotations

import itertools
from typing import Any

from fake.library import _torch
from fake.library.opcheck.fake_kernel import compare, run_fake
from fake.library.opcheck.inputs import Call, attempt, flat_tensors, layout_variations, size_variations
from fake.library.opcheck.result import CheckFailure, Evidence

__all__ = ["NAME", "check", "check_sizes"]

NAME = "test_fake_variations"

_FIXES = {
    "size": "compute the output's sizes from the inputs' sizes; sizes that depend on data need new_dynamic_size()",
    "inputs": "use empty_like (keeps strides) where the kernel keeps them, new_empty (contiguous) where it does not",
    "tensor": "use empty_like (keeps strides) where the kernel keeps them, new_empty (contiguous) where it does not",
    "value": "the size depends on data: use get_ctx().new_dynamic_size() for it",
}


def check(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """Other sizes, storage offsets, values, strides and dtypes.

    Inputs that the real kernel refuses say nothing and are skipped.

    Raises:
        CheckFailure: the real kernel accepts a variation, and the fake one fails or answers something else.
    """
    return _check(op, call, layouts=True)


def check_sizes(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """As `check`, without strides and dtypes: what operators of other libraries are held to by default."""
    return _check(op, call, layouts=False)


def _check(op: Any, call: Call, *, layouts: bool) -> str:
    name = _torch.op_overload_name(op)
    baseline = attempt(lambda *a, **k: run_fake(op, Call(a, k)), call.detached())
    if baseline.error is not None:
        return "no fake kernel that works on the sample"
    ran = 0
    calls = [size_variations(call, may_shrink=_torch.is_defined_in_python(op) or not _indexes(call))]
    if layouts:
        calls.append(layout_variations(call))
    for variation in itertools.chain(*calls):
        real = attempt(lambda *a, **k: op(*a, **k), variation)
        if real.error is not None:
            continue
        ran += 1
        inputs = f"{variation.label}: {variation.describe()}"
        fake = attempt(lambda *a, **k: run_fake(op, Call(a, k)), variation)
        if fake.error is not None:
            if isinstance(fake.error, (_torch.UnsupportedOperatorException, NotImplementedError)):
                continue
            evidence = [
                Evidence("fake kernel", "an answer", f"{type(fake.error).__name__}: {fake.error}", inputs)
            ]
        else:
            evidence = compare(real.value, fake.value, inputs)
        if evidence:
            kind = next((k for k in _FIXES if k in variation.label.split(":")[0]), "")
            raise CheckFailure(
                NAME,
                name,
                f"the fake kernel is right for the sample but wrong with {variation.label}",
                evidence=tuple(evidence),
                fix=_FIXES.get(kind, "derive the output's dtype from the inputs' as the kernel does"),
            )
    return f"{ran} variations"


def _indexes(call: Call) -> bool:
    return any(
        not t.is_floating_point() and not t.is_complex() for t in flat_tensors((call.args, call.kwargs))
    )
