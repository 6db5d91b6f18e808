"""Check what kernels and fake kernels return against the schema."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fake.library.errors import FakeKernelError, KernelReturnError


def checked_kernel(qualname: str, schema: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that it checks what it returns.

    With too many outputs, the dispatcher would write past the end of its stack, and the process would die.

    Raises (when it runs):
        KernelReturnError: the number of outputs is not the schema's, or an output is no tensor where it is to be.

    Args:
        qualname: ``"ns::name"``, for the message.
        schema: the operator's schema.
        kernel: the kernel to wrap.
    """
    expected = len(schema.returns)
    holds_tensors = bool(expected) and all(str(r.type) in ("Tensor", _TENSORS) for r in schema.returns)

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if expected > 1 and isinstance(result, (tuple, list)) and len(result) != expected:
            raise KernelReturnError(
                f"{qualname}: the kernel returned {len(result)} outputs, the schema has {expected}: {schema}",
                op=qualname,
            )
        return check_result(qualname, schema, result) if holds_tensors else result

    return checked


def check_result(qualname: str, schema: Any, result: Any) -> Any:
    """Convert a kernel's result to the form that the dispatcher returns.

    Args:
        qualname: ``"ns::name"``, for the message.
        schema: the operator's schema.
        result: the kernel's result.

    Raises:
        KernelReturnError: the schema's return types do not allow the result.
    """
    kinds = [str(r.type) for r in schema.returns]
    if not kinds:
        if result is None:
            return None
    elif len(kinds) == 1:
        if _fits(kinds[0], result):
            return list(result) if kinds[0] == _TENSORS else result
    elif isinstance(result, (tuple, list)) and len(result) == len(kinds) and all(map(_fits, kinds, result)):
        return tuple(result)
    raise KernelReturnError(
        f"{qualname}: Unable to cast {result!r} to {', '.join(kinds) or 'None'}: the kernel must return what the "
        f"schema says: {schema}",
        op=qualname,
    )


_TENSORS = "List[Tensor]"


def _fits(kind: str, value: Any) -> bool:
    """Whether a value can be an output of this type. The dispatcher passes on ``None`` in place of a tensor."""
    if kind == _TENSORS:
        return isinstance(value, (tuple, list)) and all(isinstance(one, torch.Tensor) for one in value)
    return value is None or isinstance(value, torch.Tensor)


def checked_fake_kernel(qualname: str, schema: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake kernel so that it checks what it returns.

    Raises (when it runs):
        FakeKernelError: the number of outputs is not the schema's, or an output holds data.

    Args:
        qualname: ``"ns::name"``, for the message.
        schema: the operator's schema.
        fn: the fake kernel to wrap.
    """
    expected = len(schema.returns)

    @functools.wraps(fn)
    def fake_kernel(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        outputs: Sequence[Any]
        if expected == 0:
            outputs = () if result is None else (result,)
        elif expected == 1:
            outputs = (result,)
        else:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
        if len(outputs) != expected:
            raise FakeKernelError(
                f"{qualname}: the fake kernel returned {len(outputs)} outputs, the schema has {expected}: {schema}",
                op=qualname,
            )
        for index, output in enumerate(outputs):
            for tensor in output if isinstance(output, (list, tuple)) else (output,):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta":
                    raise FakeKernelError(
                        f"{qualname}: output {index} of the fake kernel is a real tensor with data. Make outputs from "
                        "the inputs (x.new_empty(...), torch.empty_like(x)), not from tensors captured outside.",
                        op=qualname,
                    )
        return result

    return fake_kernel
