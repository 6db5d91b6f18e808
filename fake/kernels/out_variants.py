"""Rules for ``out=`` variants: how eager checks and resizes the tensors that it is given for results.

The functional operator determines the results. A given tensor that already has the right shape is left alone;
any other is resized. The layout after a resize depends on the kernel, and there are a few cases
(:class:`Resized`). All structured operators behave alike; the others are listed.
"""

from __future__ import annotations

import enum
import functools
import warnings
from typing import Any

import torch

from fake.kernels.outputs import all_dense, column_major_strides, dtype_name, is_symbolic
from fake.kernels.resize import restride
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule, rule_when
from fake.seam.dispatch import hides_structured_meta
from fake.seam.symbolic_shapes import guard_or_false


class Resized(enum.Enum):
    """The layout that eager gives to an ``out`` tensor when it resizes it."""

    #: Like the functional result: structured kernels, and kernels that pass ``out`` to a TensorIterator.
    LIKE_RESULT = enum.auto()
    ROW_MAJOR = enum.auto()
    #: Row-major, or untouched if the result is empty: statistics of a batch norm that computes none.
    ROW_MAJOR_IF_ANY = enum.auto()
    #: LAPACK kernels make an empty ``out`` column-major (even one of the right shape) and compute into it.
    #: They copy into any other ``out``.
    LAPACK = enum.auto()


#: Unstructured out variants that torch's engine gets wrong or does not support, with the layout of each
#: resized result.
_RESIZED_AS: dict[str, tuple[Resized, ...]] = {
    "aten::_native_batch_norm_legit.out": (Resized.ROW_MAJOR, *(Resized.ROW_MAJOR_IF_ANY,) * 2),
    "aten::_native_batch_norm_legit.no_stats_out": (Resized.ROW_MAJOR, *(Resized.ROW_MAJOR_IF_ANY,) * 2),
    "aten::_scaled_mm.out": (Resized.ROW_MAJOR,),
    "aten::abs.out": (Resized.LIKE_RESULT,),
    "aten::addr.out": (Resized.LIKE_RESULT,),
    "aten::angle.out": (Resized.LIKE_RESULT,),
    "aten::bernoulli.out": (Resized.ROW_MAJOR,),
    "aten::_scaled_mm_v2.out": (Resized.ROW_MAJOR,),
    "aten::cholesky_inverse.out": (Resized.LAPACK,),
    "aten::complex.out": (Resized.LIKE_RESULT,),
    "aten::conj_physical.out": (Resized.LIKE_RESULT,),
    "aten::deg2rad.out": (Resized.LIKE_RESULT,),
    "aten::floor_divide.out": (Resized.LIKE_RESULT,),
    "aten::geqrf.a": (Resized.LAPACK, Resized.ROW_MAJOR),
    "aten::histogram.bin_ct_out": (Resized.ROW_MAJOR,) * 2,
    "aten::histogram.bins_tensor_out": (Resized.ROW_MAJOR,) * 2,
    "aten::linalg_eig.out": (Resized.ROW_MAJOR, Resized.LAPACK),
    "aten::linalg_householder_product.out": (Resized.LAPACK,),
    "aten::logical_and.out": (Resized.LIKE_RESULT,),
    "aten::logical_or.out": (Resized.LIKE_RESULT,),
    "aten::logical_xor.out": (Resized.LIKE_RESULT,),
    "aten::logit.out": (Resized.LIKE_RESULT,),
    "aten::ldexp.out": (Resized.LIKE_RESULT,),
    "aten::native_batch_norm.out": (Resized.ROW_MAJOR, *(Resized.ROW_MAJOR_IF_ANY,) * 2),
    "aten::ormqr.out": (Resized.LAPACK,),
    "aten::polar.out": (Resized.LIKE_RESULT,),
    "aten::rad2deg.out": (Resized.LIKE_RESULT,),
    "aten::sort.values": (Resized.LIKE_RESULT,) * 2,
    "aten::view_copy.out": (Resized.ROW_MAJOR,),
    "aten::where.self_out": (Resized.LIKE_RESULT,),
}


#: Operators that compute into a complex temporary, resize ``out`` row-major, and copy the real parts.
_COMPLEX_TO_REAL = frozenset({"aten::abs.out", "aten::angle.out"})

#: Exceptions to :func:`_casts`: operators that refuse an ``out`` of another dtype.
_NOT_CAST = frozenset(
    {
        "aten::_native_batch_norm_legit.no_stats_out",
        "aten::_native_batch_norm_legit.out",
        "aten::abs.out",
        "aten::bitwise_not.out",
        "aten::ceil.out",
        "aten::complex.out",
        "aten::conj_physical.out",
        "aten::floor.out",
        "aten::frac.out",
        "aten::gelu.out",
        "aten::hardshrink.out",
        "aten::heaviside.out",
        "aten::histogram.bin_ct_out",
        "aten::histogram.bins_tensor_out",
        "aten::isneginf.out",
        "aten::isposinf.out",
        "aten::native_batch_norm.out",
        "aten::neg.out",
        "aten::ormqr.out",
        "aten::polar.out",
        "aten::round.decimals_out",
        "aten::round.out",
        "aten::sgn.out",
        "aten::sign.out",
        "aten::signbit.out",
        "aten::softplus.out",
        "aten::softshrink.out",
        "aten::sort.values",
        "aten::trunc.out",
        "aten::view_copy.out",
        "aten::where.self_out",
    }
)

#: Exceptions to :func:`_casts`: operators that cast.
_CASTS = frozenset({"aten::cat.out"})

#: Operators that write to any dtype, and operators that also write booleans as ``uint8``.
_ANY_DTYPE = frozenset({"aten::bernoulli.out"})
_BOOL_AS_UINT8 = frozenset(
    {
        "aten::all.out",
        "aten::all.all_out",
        "aten::all.dims_out",
        "aten::any.out",
        "aten::any.all_out",
        "aten::any.dims_out",
    }
)

#: Arguments of factory functions that out variants lack, because the given tensor determines them.
_FACTORY_ARGUMENTS = frozenset({"dtype", "layout", "device", "pin_memory"})


@functools.cache
def out_names(func: OpOverload) -> tuple[str, ...]:
    """Return the names of ``func``'s ``out`` arguments; empty if it is not an out variant.

    >>> out_names(torch.ops.aten.geqrf.a)
    ('a', 'tau')
    """
    arguments = func._schema.arguments
    return tuple(
        a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def functional_of(func: OpOverload) -> OpOverload | None:
    """Return the overload that takes ``func``'s other arguments and returns new tensors, or ``None``.

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
        arguments = [
            (a.name, str(a.type)) for a in candidate._schema.arguments if a.name not in _FACTORY_ARGUMENTS
        ]
        if arguments == wanted and not out_names(candidate):
            return candidate
    return None


@functools.cache
def _resized_outputs(func: OpOverload, functional: OpOverload) -> tuple[Resized, ...] | None:
    """Return how each ``out`` is resized, or ``None`` where torch's engine already knows."""
    if hides_structured_meta(functional):
        return (Resized.LIKE_RESULT,) * len(out_names(func))
    return _RESIZED_AS.get(func.name())


@rule_when(lambda func: func.namespace == "aten" and functional_of(func) is not None)
def _out_variant(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Compute the metadata of the functional result, then resize the given tensors as eager does.

    Kernels that torch's engine gets right are handled here only for symbolic sizes, which it cannot resize.
    """
    functional = functional_of(func)
    assert functional is not None
    names = out_names(func)
    outs = [kwargs[name] for name in names]
    if len(outs) == 1 and isinstance(outs[0], list | tuple):
        return NotImplemented  # torch's engine fills lists correctly
    ways = _resized_outputs(func, functional)
    if func.name() in _COMPLEX_TO_REAL and args[0].is_complex():
        ways = (Resized.ROW_MAJOR,)
    if (ways is None and not is_symbolic(args, kwargs)) or not all_dense(args, kwargs):
        return NotImplemented
    ways = ways or (Resized.ROW_MAJOR,) * len(outs)
    given = {k: v for k, v in kwargs.items() if k not in names}
    if any(a.name == "dtype" for a in functional._schema.arguments if a.name in _FACTORY_ARGUMENTS):
        given = {"dtype": outs[0].dtype, "device": outs[0].device, **given}
    with mode:
        result = functional(*args, **given)
        results = list(result) if isinstance(result, tuple | list) else [result]
        for name, out, wanted in zip(names, outs, results, strict=True):
            check_out(func, name, out, wanted, casts=_casts(func, functional))
            if (
                any(arg is out for arg in args)
                and torch.Tag.pointwise in functional.tags
                and not is_symbolic(args, kwargs)
            ):
                check_shape_of_input(func, name, out, wanted)
        for out, wanted, way in zip(outs, results, ways, strict=True):
            if way is Resized.LAPACK and out.numel() == 0:
                restride(out, wanted.shape, column_major_strides(wanted.shape))
            elif way is not Resized.ROW_MAJOR_IF_ANY or wanted.numel() != 0:
                resize_out(out, wanted.shape, _like(wanted) if way is Resized.LIKE_RESULT else None)
    return outs[0] if len(outs) == 1 else tuple(outs)


@rule("aten::nansum.out")
def _nansum_out(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``nansum`` with symbolic sizes; it computes in ``out``'s dtype unless ``dtype`` is given."""
    if not is_symbolic(args, kwargs):
        return NotImplemented
    out = kwargs["out"]
    given = {k: v for k, v in kwargs.items() if k != "out"}
    with mode:
        result = torch.ops.aten.nansum(*args, **{**given, "dtype": given.get("dtype") or out.dtype})
        check_out(func, "out", out, result, casts=False)
        resize_out(out, result.shape)
    return out


@rule("aten::softmax.int_out", "aten::log_softmax.int_out")
def _softmax_out(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Handle symbolic sizes: like eager, convert the input and pass ``out`` to the structured operator."""
    if not is_symbolic(args, kwargs):
        return NotImplemented
    source, dim = args[:2]
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    aten = torch.ops.aten
    structured = aten._softmax if func.overloadpacket is aten.softmax else aten._log_softmax
    with mode:
        source = source if dtype is None else source.to(dtype)
        return structured.out(source, dim, False, out=kwargs["out"])


def _like(result: torch.Tensor) -> Any:
    """Return the strides of a copy: ``conj_physical`` of a real tensor is that tensor, dense or not."""
    if guard_or_false(result.numel() == 0):
        return result.stride()
    return torch.empty_like(result).stride()


@functools.cache
def _casts(func: OpOverload, functional: OpOverload) -> bool:
    """Return whether eager casts the result to ``out``'s dtype (losing nothing) instead of refusing it.

    Structured operators cast if they are elementwise, or if ``out`` determines the compute dtype.
    """
    if func.name() in _NOT_CAST:
        return False
    decides = any(a.name == "dtype" for a in functional._schema.arguments)
    return (
        func.name() in _CASTS
        or decides
        or torch.Tag.pointwise in functional.tags
        or not hides_structured_meta(functional)
    )


def check_out(func: OpOverload, name: str, out: torch.Tensor, wanted: torch.Tensor, *, casts: bool) -> None:
    """Raise if ``out`` cannot hold the result.

    Args:
        func: the ``out=`` overload.
        name: the argument's name, for the message.
        out: the tensor that was passed.
        wanted: the result of the functional operator.
        casts: whether eager casts the result to ``out``'s dtype.

    Raises:
        RuntimeError: the dtype or device is wrong (eager's error).
    """
    if func.name() in _BOOL_AS_UINT8 and out.dtype is torch.uint8:
        wanted = wanted.to(torch.uint8)
    if not casts and out.dtype != wanted.dtype:
        raise RuntimeError(
            f"{func.name()}: expected argument {name!r} to have dtype {dtype_name(wanted.dtype)}, but got "
            f"{dtype_name(out.dtype)} instead"
        )
    if not torch.can_cast(wanted.dtype, out.dtype) and func.name() not in _ANY_DTYPE:
        raise RuntimeError(
            f"{func.name()}: result type {dtype_name(wanted.dtype)} can't be cast to the desired output type "
            f"{dtype_name(out.dtype)} of argument {name!r}"
        )
    if out.device != wanted.device:
        raise RuntimeError(
            f"{func.name()}: Expected all tensors to be on the same device, but found at least two devices, "
            f"{wanted.device} and {out.device} (argument {name!r})"
        )


def check_shape_of_input(func: OpOverload, name: str, out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise if an ``out`` that is also an input would have to be resized.

    Args:
        func: the ``out=`` overload.
        name: the argument's name, for the message.
        out: the tensor that was passed, which is also read.
        wanted: the result of the functional operator.

    Raises:
        RuntimeError: the shapes differ.
    """
    if out.shape != wanted.shape:
        raise RuntimeError(
            f"{func.name()}: output with shape {list(out.shape)} doesn't match the broadcast shape {list(wanted.shape)} "
            f"(argument {name!r} is an input, too, and cannot be resized)"
        )


def resize_out(out: torch.Tensor, shape: Any, strides: Any = None) -> None:
    """Resize ``out`` to ``shape`` if its shape differs, with ``strides`` (row-major if ``None``).

    Call this under the mode, so that the engine sees the metadata change.

    Args:
        out: the tensor that was passed.
        shape: the result's shape.
        strides: the result's strides in elements.
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
    restride(out, shape, strides)
