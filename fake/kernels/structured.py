"""Structured operators: answer with eager's own C++ meta function instead of torch's Python version.

The one C++ meta function of a structured operator determines the shape, dtype and strides of its result on
every backend. torch registers Python functions over many of them to support symbolic sizes, and those give
other strides for inputs that are not row-major. With concrete sizes, the rule calls the C++ function. With
symbolic sizes, it keeps the Python answer and corrects its layout to that of the C++ function at the hints.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.outputs import all_dense, hinted, is_row_major, is_symbolic, with_layout
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule, rule_when
from fake.seam import pytree
from fake.seam.dispatch import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    has_symbols,
    hides_structured_meta,
    structured_meta,
)
from fake.seam.fake_tensor import in_kernel_invocation_manager, torch_result, wrap


def _is_functional_structured(func: OpOverload) -> bool:
    """Return whether an operator is functional, structured, and of a shape that does not depend on values."""
    if func.namespace != "aten" or func._schema.is_mutable or torch.Tag.dynamic_output_shape in func.tags:
        return False
    return hides_structured_meta(func)


@rule_when(_is_functional_structured)
def structured(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a structured operator's result with eager's strides.

    Args:
        mode: see ``Rule``.
        func: a structured operator, not an ``out=`` one.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if not all_dense(args, kwargs) or _is_empty_index_add(func, args):
        return NotImplemented
    promotes = torch.Tag.pointwise in func.tags and _is_on_cpu(args)
    if not is_symbolic(args, kwargs):
        with in_kernel_invocation_manager(mode):
            result = _structured_meta(func, args, kwargs, promotes)
        return wrap(mode, func, args, kwargs, result)
    python_result = torch_result(mode, func, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if all(is_row_major(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return python_result  # torch's own functions are right for these, by far the most common case
    examples = [hinted(leaf) for leaf in leaves]
    if any(example is None and leaf is not None for example, leaf in zip(examples, leaves, strict=True)):
        return python_result
    example_args, example_kwargs = pytree.tree_unflatten(examples, spec)
    example = _structured_meta(func, example_args, example_kwargs, promotes)
    results, result_spec = pytree.tree_flatten(python_result)
    corrected = [with_layout(mode, a, e) for a, e in zip(results, pytree.tree_leaves(example), strict=True)]
    return pytree.tree_unflatten(corrected, result_spec)


@rule("aten::pow.Tensor_Scalar", "aten::pow_.Scalar")
def _pow_by_number(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle bool to the power of a bool: the kernel copies or fills, and does not support it otherwise."""
    base, exponent = args
    if base.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented if func._schema.is_mutable else structured(mode, func, args, kwargs)
    if func._schema.is_mutable:
        return base
    with mode:
        return torch.ops.aten.logical_not.default(base)


@rule("aten::__lshift__.Scalar", "aten::__rshift__.Scalar")
def _shift_by_number(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Shift booleans as the integers that they promote to; torch's kernel checks the dtype first."""
    if args[0].dtype is not torch.bool or type(args[1]) is not int:
        return NotImplemented
    with mode:
        return torch.ops.aten.add.Tensor(args[0], args[1])


@rule("aten::round.decimals")
def _round_decimals(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Answer like ``round``: torch's version multiplies by a power of ten that may overflow."""
    with mode:
        return torch.ops.aten.round.default(args[0])


def _is_empty_index_add(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether this is an empty ``index_add``, where the C++ meta function checks more than eager."""
    if func is not torch.ops.aten.index_add.default or has_symbols(args[0]):
        return False
    return args[0].dim() > 1 and args[0].numel() == 0


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _structured_meta(func: OpOverload, args: Args, kwargs: Kwargs, promotes: bool) -> Any:
    """Return the C++ meta function's answer; if ``promotes``, for operands in the common dtype.

    On CPU, a TensorIterator converts operands of other dtypes into dense temporaries (``compute_types``). An
    expanded operand is then no longer ambiguous about the order of dimensions.
    """
    result = structured_meta(func, *args, **kwargs)
    if not promotes or not isinstance(result, torch.Tensor):
        return result
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if all(tensor.dtype == result.dtype for tensor in tensors):
        return result
    operands = [arg for arg in args if isinstance(arg, torch.Tensor | int | float | complex)]
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    if result.dtype.is_floating_point and not common.is_floating_point and not common.is_complex:
        common = result.dtype
    converted = [
        torch.empty_like(arg, dtype=common) if isinstance(arg, torch.Tensor) and arg.dtype != common else arg
        for arg in args
    ]
    strides = structured_meta(func, *converted, **kwargs).stride()
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device="meta")
