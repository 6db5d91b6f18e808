"""Rules for unstructured elementwise operators whose kernels use a TensorIterator.

The strides that it chooses (``reorder_dimensions`` in ``aten/src/ATen/TensorIterator.cpp``) depend only on
the shapes and strides of the operands. So :func:`iterator_strides` asks a structured operator with as many
operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import hinted, row_major, with_layout
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import structured_meta
from fake.seam.fake_tensor import in_kernel_invocation_manager, torch_result

aten = torch.ops.aten

#: A structured elementwise operator for each number of operands.
_OP_BY_ARITY = {1: aten.neg.default, 2: aten.add.Tensor, 3: aten.addcmul.default}

#: The arguments that are operands of the iterator, in its order: if strides disagree, the first operand wins.
_OPERANDS = {
    "aten::logical_and": (0, 1),
    "aten::logical_or": (0, 1),
    "aten::logical_xor": (0, 1),
    "aten::relu": (0,),
    "aten::hardtanh": (0,),
    "aten::complex": (0, 1),
    "aten::polar": (0, 1),
    "aten::rsub.Scalar": (0,),
}


def iterator_strides(mode: FakeTensorMode, operands: Sequence[Any]) -> torch.Tensor | None:
    """Return a meta tensor with the shape and strides of a TensorIterator's output, at the hints.

    Returns ``None`` if a size has no hint. Python numbers count as operands without dimensions, as they do in
    eager.
    """
    metas = []
    for operand in operands:
        if not isinstance(operand, torch.Tensor):
            metas.append(torch.empty((), device="meta"))
            continue
        example = hinted(operand)
        if example is None:
            return None
        metas.append(torch.empty(0, device="meta").as_strided(example.shape, example.stride()))
    with in_kernel_invocation_manager(mode):
        return structured_meta(_OP_BY_ARITY[len(metas)], *metas)


@rule(*_OPERANDS)
def _pointwise(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return torch's shape and dtype with a TensorIterator's strides."""
    result = torch_result(mode, func, args, kwargs)
    example = iterator_strides(mode, [args[place] for place in _OPERANDS[func.name()]])
    return result if example is None else with_layout(mode, result, example)


@rule("aten::native_dropout_backward")
def _dropout_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``grad * mask * scale``, with the dtype that all of them promote to."""
    grad, mask, scale = args
    with mode:
        return aten.mul.Tensor(aten.mul.Tensor(grad, mask), scale)


@rule("aten::ldexp.Tensor")
def _ldexp(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``self * 2 ** other``, with integer exponents in ``self``'s dtype."""
    self, other = args
    with mode:
        if not other.is_floating_point() and not other.is_complex():
            is_number = self.is_floating_point() or self.is_complex()
            other = other.to(self.dtype if is_number else torch.get_default_dtype())
        return aten.mul.Tensor(self, aten.pow.Scalar(2.0, other))


@rule("aten::nan_to_num_")
def _nan_to_num_(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle complex tensors: torch's decomposition cannot test their parts for infinities."""
    return args[0] if args[0].is_complex() else NotImplemented


@rule("aten::angle")
def _angle(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """For complex numbers on CPU, return a row-major tensor, like ``out=`` with an empty tensor."""
    result = torch_result(mode, func, args, kwargs)
    return row_major(mode, result) if args[0].is_complex() and args[0].device.type == "cpu" else result


@rule(
    "aten::normal.Tensor_float",
    "aten::normal.float_Tensor",
    "aten::glu_backward",
    "aten::log_sigmoid_forward",
    "aten::nll_loss2d_forward",
    "aten::native_layer_norm_backward",
)
def _row_major_result(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return torch's answer in row-major layout, for kernels that ignore the strides of their inputs."""
    return row_major(mode, torch_result(mode, func, args, kwargs))


@rule("aten::normal.Tensor_Tensor")
def _normal(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a row-major result in the dtype of the means."""
    result = _row_major_result(mode, func, args, kwargs)
    with mode:
        return result.to(args[0].dtype)


@rule("aten::masked_fill.Scalar", "aten::masked_fill.Tensor")
def _masked_fill(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a row-major result; a complex value becomes real for a real tensor.

    A fake value cannot tell whether it has an imaginary part or fits."""
    bound = bind(func, args, kwargs)
    self, value = bound["self"], bound["value"]
    if not self.is_complex():
        with mode:
            if isinstance(value, complex):
                bound["value"] = bool(value) if self.dtype is torch.bool else value.real
            elif isinstance(value, torch.Tensor) and value.is_complex():
                bound["value"] = value.real
    return row_major(mode, torch_result(mode, func, tuple(bound.values()), {}))


@rule("aten::log_sigmoid_backward")
def _like_gradient(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``empty_like(grad_output)``, whatever the strides of the other operands."""
    result = torch_result(mode, func, args, kwargs)
    with mode:
        return torch.empty_like(args[0]) if args[0].shape == result.shape else result
