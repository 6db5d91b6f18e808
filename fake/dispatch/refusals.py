"""Steps that raise the errors that eager raises and meta kernels miss.

They run on a cache miss only: a call served from the cache has passed them before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fake.cache.replacements import REPLACEMENTS
from fake.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    MixedFakeModesError,
    NonFakeInputError,
    UnsupportedOperatorException,
)
from fake.kernels.checks import check_arguments, has_checks
from fake.kernels.dtypes import refusal
from fake.kernels.out_variants import functional_of, out_names
from fake.kernels.outputs import dtype_name
from fake.kernels.overlaps import check_overlaps
from fake.seam.dispatch import OpOverload, library_utils
from fake.seam.proxy_tensor import is_tracing
from fake.seam.symbolic_shapes import has_unbacked

_NOT_A_REFUSAL = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def refuse_dtypes(mode: Any, call: Any) -> None:
    """Refuse dtypes that eager's kernel does not implement. This covers only calls by the user: a
    decomposition, which eager does not run, may use operators on dtypes that only their meta kernels support.

    Raises:
        RuntimeError, NotImplementedError, IndexError, TypeError, ValueError: as eager does.
    """
    if is_tracing() or not isinstance(call.func, OpOverload) or REPLACEMENTS.includes(call.func):
        return
    error = refusal(call.func, call.args, call.kwargs)
    if error is None and call.func._schema.is_mutable:
        error = _functional_refusal(call)
    if error is not None:
        raise error


def _functional_refusal(call: Any) -> Exception | None:
    """Return the functional form's refusal: in-place and ``out=`` operators compute what it computes."""
    functional = functional_of_in_place(call.func)
    if functional is not None:
        return refusal(functional, call.args, call.kwargs)
    functional = functional_of(call.func)
    if functional is None:
        return None
    names = out_names(call.func)
    return refusal(functional, call.args, {k: v for k, v in call.kwargs.items() if k not in names})


def refuse_arguments(mode: Any, call: Any) -> None:
    """Run the checks of ``fake.kernels.checks`` on dense tensors, and those of ``fake.kernels.overlaps`` if
    no size is symbolic.

    With symbolic sizes each comparison in a check is a guard: the sizes that eager refuses need another
    graph, and tracing it raises the error. Unbacked sizes are left to the operator itself, which checks them
    when the graph runs.

    Raises:
        RuntimeError, IndexError: as eager does.
    """
    func = call.func
    if not isinstance(func, OpOverload) or REPLACEMENTS.includes(func):
        return
    if any(t.layout is not torch.strided or t.is_nested or t.is_quantized for t in call.fakes):
        return
    if not call.has_symbols or (has_checks(func) and not has_unbacked((call.args, call.kwargs))):
        with eager_errors(func):
            check_arguments(func, call.args, call.kwargs)
    if not call.has_symbols and func._schema.is_mutable:
        check_overlaps(func, call.args, call.kwargs)


@functools.cache
def functional_of_in_place(func: Any) -> Any:
    """Return the overload whose result ``func`` writes to its first argument, or ``None``.

    >>> functional_of_in_place(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    schema = func._schema
    name = schema.name.split("::")[1]
    if (
        func.namespace != "aten"
        or not name.endswith("_")
        or name.startswith("_")
        or name in _UNLIKE_FUNCTIONAL
    ):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.inplace_view in func.tags:
        return None
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None or not schema.arguments or written != [schema.arguments[0].name]:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


_UNLIKE_FUNCTIONAL = frozenset(
    ("copy_", "fill_", "zero_", "set_", "resize_", "resize_as_", "detach_", "addbmm_", "nan_to_num_")
)
"""In-place operators that accept more than their functional forms, or have nothing to refuse."""


def refuse_in_place(mode: Any, call: Any, dispatch: Callable[..., Any]) -> None:
    """Refuse an in-place call that eager refuses: what the functional form refuses, a result of another shape
    than the tensor written to, and, if it is elementwise, a result whose dtype cannot be cast to that
    tensor's.

    Args:
        dispatch: ``dispatch(mode, func, types, args, kwargs)``, bypassing the cache.

    Raises:
        RuntimeError: as eager does; or whatever the functional form raises.
    """
    func = call.func
    if call.has_symbols or not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return
    functional = functional_of_in_place(func)
    if functional is None or any(
        t.layout is not torch.strided or t.is_nested or t.is_quantized for t in call.fakes
    ):
        return
    if not mode.is_our_fake(call.args[0]) or REPLACEMENTS.includes(func) or REPLACEMENTS.includes(functional):
        return
    written = call.args[0]
    try:
        result = dispatch(mode, functional, (), call.args, call.kwargs)
    except _NOT_A_REFUSAL:
        return
    if result.shape != written.shape:
        raise RuntimeError(
            f"{func}: output with shape {list(written.shape)} doesn't match the broadcast shape {list(result.shape)} "
            "(argument 'self' is written to and cannot grow)"
        )
    if torch.Tag.pointwise in func.tags and not torch.can_cast(result.dtype, written.dtype):
        raise RuntimeError(
            f"{func}: result type {dtype_name(result.dtype)} can't be cast to the desired output type "
            f"{dtype_name(written.dtype)} of argument 'self'"
        )


@contextmanager
def eager_errors(func: Any) -> Iterator[None]:
    """Convert errors of Python kernels (asserts, missing keys, short tuples) to eager's ``RuntimeError``."""
    try:
        yield
    except (NonFakeInputError, MixedFakeModesError):
        raise
    except (AssertionError, KeyError) as error:
        if isinstance(func, OpOverload) and library_utils.is_builtin(func):
            raise RuntimeError(f"{func}: {error}") from error
        raise
    except ValueError as error:
        if func in _NO_VALUE_ERRORS or "std::vector" in str(error):
            raise RuntimeError(f"{func}: {error}") from error
        raise
    except IndexError as error:
        if str(error) in _PYTHON_INDEX_ERRORS:
            raise RuntimeError(
                f"{func}: an argument has fewer dimensions than the operator looks at ({error})"
            ) from error
        raise


@contextmanager
def data_dependent_advice(func: Any) -> Iterator[None]:
    """Add advice to torch's errors about data-dependent results, which name only the operator."""
    try:
        yield
    except DataDependentOutputException as error:
        error.args = (
            f"{func}: the result depends on values, which fake tensors do not have. Let real tensors travel along "
            "(make the mode under torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True)), make the mode "
            "with shape_env=ShapeEnv() for a symbolic result, or keep the value in Python.",
        )
        raise


aten = torch.ops.aten
_NO_VALUE_ERRORS = frozenset((aten.view.default, aten._unsafe_view.default))
_PYTHON_INDEX_ERRORS = (
    "tuple index out of range",
    "list index out of range",
    "list assignment index out of range",
)
"""Messages of kernels in Python that ask for the size of a dimension that does not exist."""
