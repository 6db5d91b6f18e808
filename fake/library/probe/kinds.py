"""Candidates for dtypes and strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fake.library.probe.shapes import TIER, Vocabulary

_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.float64, torch.uint8, torch.complex64)


def dtype_candidates(words: Vocabulary) -> Iterator[Any]:
    """Expressions for the dtype of one output, simplest first."""
    tensors = (words.tensors + words.elements)[:4]
    bases = [f"{p}.dtype" for p in tensors]
    if len(tensors) > 1:
        bases.append(f"promoted({', '.join(tensors)})")
    for name in words.lists:
        bases.append(f"promoted(*{name})")
    operands = tensors + words.ints + words.floats
    if tensors and len(operands) > len(tensors):
        bases.append(f"promoted({', '.join(operands)})")
        bases += [f"promoted({tensors[0]}, {number})" for number in words.ints + words.floats]
    for pair in itertools.pairwise(tensors):
        bases.append(f"promoted({', '.join(pair)})")
    plain = list(dict.fromkeys(bases))
    for base in plain:
        for given in words.dtypes:
            yield f"{given} or {base}"
            yield f"{given} or floating({base})"
            yield f"{given} or integral_sum({base})"
            yield f"{given} or real({base})"
    yield from plain
    yield from (f"floating({base})" for base in plain)
    yield from (f"real({base})" for base in plain)
    yield from (f"real(floating({base}))" for base in plain)
    yield from (f"integral_sum({base})" for base in plain)
    yield from (f"to_complex({base})" for base in plain)
    for given in words.dtypes:
        yield f"{given} or torch.get_default_dtype()"
        yield f"{given} or torch.int64"
    yield from (str(dtype) for dtype in _DTYPES)
    for flag in words.flags:
        yield f"torch.int32 if {flag} else torch.int64"


def stride_candidates(words: Vocabulary) -> Iterator[Any]:
    """Expressions for the strides of one output of ``shape``, simplest first."""
    tensors = (words.tensors + words.elements)[:4]
    yield "row_major(shape)"
    if tensors:
        yield f"elementwise_strides(shape, {', '.join(tensors)})"
    for p in tensors[:2]:
        yield f"elementwise_strides(shape, {p})"
        yield f"suggested_strides(shape, {p})"
        yield f"ordered_strides(shape, {p})"
        yield f"{p}.stride()"
    yield TIER
    yield "transposed(row_major(transposed(shape, -1, -2)), -1, -2)"
    yield "row_major(shape[::-1])[::-1]"
    for dim in (*words.ints, "0", "1"):
        yield f"moved_strides(shape, {dim})"
