"""Structured operators: eager's own C++ meta function, where torch's fake engine answers with a Python rewrite.

A structured operator has one C++ meta function that decides the shape, dtype and strides of its result, on every
backend. torch registers Python functions over many of them for the sake of symbolic sizes, and those differ in
strides for inputs that are not row-major. With concrete sizes the rule calls the C++ function itself; with symbolic
ones it keeps the Python answer and corrects its layout to what the C++ function says at the hints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fake.kernels._torch import (
    FakeTensorMode,
    OpOverload,
    hides_structured_meta,
    hint,
    in_kernel_invocation_manager,
    structured_meta,
    torchs_answer,
    wrap,
)
from fake.kernels.outputs import fresh, hinted, is_symbolic, permuted_strides
from fake.kernels.registry import rule_when

__all__ = ["structured"]


def _is_functional_structured(func: OpOverload) -> bool:
    return func.namespace == "aten" and not func._schema.is_mutable and hides_structured_meta(func)


@rule_when(_is_functional_structured)
def structured(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The structured operator's result with eager's strides."""
    if not is_symbolic(args, kwargs):
        with in_kernel_invocation_manager(mode):
            result = structured_meta(func, *args, **kwargs)
        return wrap(mode, func, args, kwargs, result)
    answer = torchs_answer(mode, func, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    examples = [hinted(leaf) for leaf in leaves]
    if any(example is None and leaf is not None for example, leaf in zip(examples, leaves, strict=True)):
        return answer
    example_args, example_kwargs = pytree.tree_unflatten(examples, spec)
    example = structured_meta(func, *example_args, **example_kwargs)
    answers, answer_spec = pytree.tree_flatten(answer)
    corrected = [with_layout(mode, a, e) for a, e in zip(answers, pytree.tree_leaves(example), strict=True)]
    return pytree.tree_unflatten(corrected, answer_spec)


def with_layout(mode: FakeTensorMode, answer: Any, example: Any) -> Any:
    """``answer``, laid out anew in the order of ``example``'s dimensions if the two disagree at the hints."""
    if not isinstance(answer, torch.Tensor) or tuple(hint(s) for s in answer.stride()) == example.stride():
        return answer
    strides = example.stride()
    order = sorted(range(example.dim()), key=lambda d: (-strides[d], d))
    layout = permuted_strides(answer.shape, order)
    return fresh(mode, answer.shape, layout, dtype=answer.dtype, device=answer.device)
