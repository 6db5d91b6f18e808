"""``out=``: what eager does to the tensors that it is given for its results.

One rule for every structured operator, and for the others that are listed. The functional operator says what the
results are; then each given tensor is left alone if it has the right shape, and resized if it has not. A structured
operator gives a resized tensor the strides of its functional result; others resize to row-major, unless they compute
into a column-major tensor, as LAPACK wants it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from fake.kernels._torch import FakeTensorMode, OpOverload, hides_structured_meta
from fake.kernels.registry import rule_when

__all__ = ["functional_of", "out_names", "out_variant", "resize_out"]


def out_names(func: OpOverload) -> tuple[str, ...]:
    """The names of ``func``'s arguments that its results are written to; empty unless it is an out variant.

    >>> out_names(torch.ops.aten.geqrf.a)
    ('a', 'tau')
    """
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written or not all(a.kwarg_only for a in written):
        return ()
    return tuple(a.name for a in written)


@functools.cache
def functional_of(func: OpOverload) -> OpOverload | None:
    """The overload that takes ``func``'s other arguments and returns new tensors, or ``None``.

    >>> functional_of(torch.ops.aten.sort.values_stable)
    <OpOverload(op='aten.sort', overload='stable')>
    """
    outs = out_names(func)
    if not outs:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in outs]
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        schema = candidate._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return candidate
    return None


def _is_structured_out(func: OpOverload) -> bool:
    if func.namespace != "aten":
        return False
    functional = functional_of(func)
    return functional is not None and hides_structured_meta(functional)


@rule_when(_is_structured_out)
def out_variant(mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the functional result's metadata, then bring the given tensors to its shape as eager does."""
    functional = functional_of(func)
    assert functional is not None
    names = out_names(func)
    outs = [kwargs[name] for name in names]
    with mode:
        result = functional(*args, **{k: v for k, v in kwargs.items() if k not in names})
        results = list(result) if isinstance(result, tuple | list) else [result]
        for name, out, wanted in zip(names, outs, results, strict=True):
            _check(func, name, out, wanted)
        for out, wanted in zip(outs, results, strict=True):
            resize_out(out, wanted.shape, wanted.stride())
    return outs[0] if len(outs) == 1 else tuple(outs)


def _check(func: OpOverload, name: str, out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Refuse an ``out`` that cannot hold the result, in eager's words."""
    if not torch.can_cast(wanted.dtype, out.dtype):
        raise RuntimeError(
            f"{func.name()}: result type {_said(wanted.dtype)} can't be cast to the desired output type "
            f"{_said(out.dtype)} of argument {name!r}"
        )
    if out.device != wanted.device:
        raise RuntimeError(
            f"{func.name()}: expected argument {name!r} to have device {wanted.device}, but got {out.device} instead"
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resize_out(out: torch.Tensor, shape: Any, strides: Any = None) -> None:
    """Give ``out`` this shape if it has another; only then does ``strides`` matter (``None``: row-major).

    To be called under the mode, so that the engine sees the metadata change.
    """
    if len(out.shape) == len(shape) and all(a == b for a, b in zip(out.shape, shape, strict=True)):
        return
    if out.numel() != 0:
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
            f"match the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=2,
        )
    out.resize_(shape)
    if strides is not None and tuple(out.stride()) != tuple(strides):
        out.as_strided_(shape, strides)
