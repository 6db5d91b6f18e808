"""The custom-op API of torch 2.0 to 2.3, for code that still uses it. New code: `fake.library.custom_op`.

The functions are those of the old ``torch._custom_ops`` (`custom_op`, `impl`, `impl_fake`, `impl_save_for_backward`,
`impl_backward`); `object_custom_op` is the older decorator that returns a `CustomOp` object with the same as methods.
A backward formula is ``backward(ctx, saved, *grads)`` and returns a dict from argument names to gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fake.library import _torch
from fake.library.errors import (
    RegistrationError,
    ReservedNamespaceError,
    SchemaError,
    UnsupportedAnnotationError,
)
from fake.library.layout import needs_layout
from fake.library.legacy_op import DEVICE_KEYS, CustomOp, find_op
from fake.library.library import Library
from fake.library.location import warn_user
from fake.library.register import get_ctx, register_fake
from fake.library.schema import RESERVED_NAMESPACES, infer_schema, parse, supported_annotations
from fake.library.signatures import signature_of

__all__ = [
    "DEVICE_KEYS",
    "CustomOp",
    "custom_op",
    "find_op",
    "get_ctx",
    "impl",
    "impl_abstract",
    "impl_backward",
    "impl_fake",
    "impl_save_for_backward",
    "object_custom_op",
]


def _parse_qualname(qualname: str) -> tuple[str, str]:
    names = qualname.split("::", 1)
    if len(names) != 2:
        raise SchemaError(f"Expected there to be a namespace in {qualname}, e.g. ns::foo", op=qualname)
    if "." in names[1]:
        raise SchemaError(
            f"This API does not handle overloads, i.e. operator names with '.' in them. Got: {qualname}",
            op=qualname,
        )
    if names[0] in RESERVED_NAMESPACES:
        raise ReservedNamespaceError(names[0])
    return names[0], names[1]


def _define(qualname: str, schema: str, *, autograd: bool = True) -> CustomOp:
    namespace, name = qualname.split("::")
    try:
        parsed = parse(f"{name}{schema}", op=qualname)
    except SchemaError as error:
        raise AssertionError(f"Invalid function schema: {name}{schema}") from error
    if not _torch.is_functional_schema(parsed) or not parsed.returns:
        raise SchemaError(
            "custom_op only supports functional operators (ops that do not mutate any inputs, do not return views of "
            f"the inputs, and has at least one return). Got the following non-functional schema: {parsed}; it must "
            "not have arguments named 'self' either",
            op=qualname,
        )
    if any(a.name == "self" for a in parsed.arguments):
        raise SchemaError(
            f"custom_op does not support arguments named 'self'. Please rename it: {parsed}", op=qualname
        )
    library = Library(namespace, "FRAGMENT")
    library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    op = CustomOp(qualname, parsed, library, _private_access=True)
    op.register_autograd_kernel()
    _report_missing_kernels(op)
    return op


def _report_missing_kernels(op: CustomOp) -> None:
    def report(key: str) -> None:
        if key == "Undefined":
            raise NotImplementedError(
                f"{op}: There were no Tensor inputs to this operator (e.g. you passed an empty list of Tensors). If "
                "it is a factory function, use CustomOp.impl_factory to register an implementation for it"
            )
        if key == "Meta":
            raise NotImplementedError(
                f"{op}: when running with device='Meta' tensors: there is no fake impl or Meta kernel registered for "
                "it. Please register one via impl_fake"
            )
        device = key.lower()
        raise NotImplementedError(
            f"{op}: when running with device='{device}' tensors: there is no {device} impl registered for this "
            f"CustomOp. Please register one via impl(device_types='{device}')"
        )

    _torch.set_report_error_callback(op._qualname, report)


def _check_function(qualname: str, fn: Any, name: str) -> None:
    if not inspect.isfunction(fn):
        raise SchemaError(f"custom_op(...)(func): Expected `func` to be a Python function, got: {type(fn)}")
    if fn.__name__ != name:
        raise SchemaError(
            f"custom_op(qualname='{qualname}', ...)(func): expected `func` to have name '{name}' but got "
            f"'{fn.__name__}'. Please either change the name of `func` or the qualname",
            op=qualname,
        )


def _infer(qualname: str, fn: Callable[..., Any]) -> str:
    if needs_layout(fn):
        raise UnsupportedAnnotationError(
            f"{qualname}: a parameter has an unsupported type for this API; fake.library.custom_op takes more. "
            f"Supported are: {', '.join(supported_annotations())}.",
            op=qualname,
            argument=None,
            annotation=None,
            supported=supported_annotations(),
        )
    return infer_schema(fn, mutates_args=())


def custom_op(qualname: str, func_or_schema: Any = None) -> Any:
    """Define an operator from an annotated prototype (decorator) or a schema; `impl` and friends fill it in.

    Raises:
        ValueError: a bad name, namespace, prototype or schema.
        DuplicateOpError: the operator exists.
    """
    _, name = _parse_qualname(qualname)

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(qualname, fn, name)
        _define(qualname, _infer(qualname, fn))
        return fn

    if func_or_schema is None:
        return wrap
    if isinstance(func_or_schema, str):
        _define(qualname, func_or_schema)
        return find_op(qualname)
    return wrap(func_or_schema)


def object_custom_op(
    qualname: str, manual_schema: str | None = None
) -> Callable[[Callable[..., Any]], CustomOp]:
    """The oldest form: a decorator that returns a `CustomOp`.

    Raises:
        ValueError: as `custom_op`; also where the function's signature does not match ``manual_schema``.
    """
    _, name = _parse_qualname(qualname)

    def wrap(fn: Callable[..., Any]) -> CustomOp:
        _check_function(qualname, fn, name)
        if manual_schema is None:
            return _define(qualname, _infer(qualname, fn))
        _check_manual_schema(qualname, parse(f"{name}{manual_schema}", op=qualname), fn)
        return _define(qualname, manual_schema)

    return wrap


def _check_manual_schema(qualname: str, schema: Any, fn: Callable[..., Any]) -> None:
    signature = signature_of(fn)
    assert signature is not None
    parameters = list(signature.parameters.values())
    text = f"func's signature: {signature}, manual_schema: {schema}"
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise SchemaError(f"positional-only args, varargs, and kwargs are not supported. {text}", op=qualname)
    if any(p.annotation is not p.empty for p in parameters):
        raise SchemaError(f"with a manual schema, `func` must have no type annotations. {text}", op=qualname)
    expected = [(a.name, bool(a.kwarg_only)) for a in schema.arguments]
    if [(p.name, p.kind is p.KEYWORD_ONLY) for p in parameters] != expected:
        raise SchemaError(f"we expect `func`'s signature to match `manual_schema`. {text}", op=qualname)
    if any(p.default is not p.empty for p in parameters) or any(
        a.has_default_value() for a in schema.arguments
    ):
        raise SchemaError(
            f"neither func nor manual_schema should have default arguments. {text}", op=qualname
        )


def _find(qualname: str, *, adopt: bool) -> CustomOp:
    op = CustomOp.alive.get(qualname)
    if op is not None and _torch.find_schema(qualname) is not None:
        return op
    if not adopt:
        raise RegistrationError(
            f'Could not find custom op "{qualname}". Did you register it here?', op=qualname
        )
    overload = find_op(qualname)
    namespace = qualname.split("::")[0]
    return CustomOp(qualname, overload._schema, Library(namespace, "FRAGMENT"), _private_access=True)


def _decorate(make: Callable[[], Callable[..., Any]], func: Callable[..., Any] | None) -> Any:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return make()(fn) or fn

    return wrap if func is None else wrap(func)


def impl(
    qualname: str, *, device_types: Any = ("cpu", "cuda"), func: Callable[..., Any] | None = None
) -> Any:
    """Register a kernel; see `CustomOp.impl`.

    Args:
        qualname: ``"ns::name"``.
        device_types: ``"cpu"``, ``"cuda"`` or both.
        func: the kernel; a decorator is returned where it is left out.
    """
    return _decorate(lambda: _find(qualname, adopt=True).impl(device_types), func)


def impl_fake(qualname: str, *, func: Callable[..., Any] | None = None) -> Any:
    """Register the fake kernel; see `CustomOp.impl_fake`."""
    return register_fake(qualname, func)


def impl_save_for_backward(qualname: str, *, func: Callable[..., Any] | None = None) -> Any:
    """Register what to save; see `CustomOp.impl_save_for_backward`."""
    return _decorate(lambda: _find(qualname, adopt=True).impl_save_for_backward(), func)


def impl_backward(
    qualname: str,
    output_differentiability: list[bool] | None = None,
    *,
    func: Callable[..., Any] | None = None,
) -> Any:
    """Register the backward formula; see `CustomOp.impl_backward`.

    Args:
        qualname: ``"ns::name"``.
        output_differentiability: for each output whether it is differentiable.
        func: the formula; a decorator is returned where it is left out.
    """
    return _decorate(lambda: _find(qualname, adopt=True).impl_backward(output_differentiability), func)


def _destroy(qualname: str) -> None:
    """Remove an operator of this API."""
    _find(qualname, adopt=False)._destroy()


def impl_abstract(
    qualname: str, func: Callable[..., Any] | None = None, *, lib: Any = None, _stacklevel: int = 1
) -> Any:
    """The name of `fake.library.register_fake` before torch 2.4.

    Args:
        qualname: ``"ns::name"``.
        func: the fake kernel; a decorator is returned where it is left out.
        lib: the registration lives as long as this library.
    """
    warn_user("impl_abstract was renamed to register_fake; please use that", FutureWarning)
    return register_fake(qualname, func, lib=lib, _stacklevel=_stacklevel)
