"""Register kernels and rules for existing operators, whoever made them.

Each function takes a `CustomOpDef`, an ``OpOverload`` or a qualified name. For operators made by `custom_op`
(here or in torch) it calls the method of the same name; for others it registers with the dispatcher through a
`Library`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.library.argument_checks import check_cast, check_dispatch_class, check_effect
from fake.library.errors import MissingContextError, UnknownOpError
from fake.library.libraries import impl, library_for
from fake.library.location import call_at, user_location, warn_user
from fake.library.signatures import check_backward, check_setup_context, check_torch_dispatch, check_vmap
from fake.seam import library as _torch

OpLike = Any


def _resolve(op: OpLike, function: str) -> tuple[Any, str]:
    """Return the custom operator (or None) and the qualified name that ``op`` stands for."""
    if isinstance(op, _torch.TorchCustomOpDef):
        return op, op._qualname
    if isinstance(op, _torch.OpOverload):
        name = _torch.op_overload_name(op)
    elif isinstance(op, str):
        name = op
        if len(op.split("::")) != 2:
            raise UnknownOpError(
                f"{function}: {op!r} is not the name of an operator; write 'namespace::name'", op=op
            )
    else:
        raise UnknownOpError(f"{function}({op}): got unexpected type for op: {type(op)}")
    return _torch.maybe_get_opdef(name), name


def _known_schema(name: str, function: str) -> Any:
    """Return an operator's schema, or raise: torch's own errors would be about its namespace."""
    schema = _torch.find_schema(name)
    if schema is None:
        raise UnknownOpError(
            f"{function}: there is no operator {name!r}; define it first, with fake.library.custom_op or define, or import what does",
            op=name,
        )
    return schema


def register_kernel(
    op: OpLike,
    device_types: Any,
    func: Callable[..., Any] | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register the kernel of one or more device types; None is the default for all.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        device_types: one, several, or None for all.
        func: the kernel; if left out, a decorator is returned.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        SignatureError: ``func`` cannot be called with the operator's arguments.
    """
    custom, name = _resolve(op, "register_kernel")
    if custom is not None:
        return (
            custom.register_kernel(device_types, func)
            if func is not None
            else custom.register_kernel(device_types)
        )
    types = "CompositeExplicitAutograd" if device_types is None else device_types
    return impl(name, types, func, lib=lib)


def register_fake(
    op: OpLike,
    func: Callable[..., Any] | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    **options: Any,
) -> Any:
    """Register the fake kernel, which computes the outputs' metadata from inputs without data.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        func: the fake kernel; if left out, a decorator is returned.
        lib: the registration lives as long as this library.
        _stacklevel: 2 if the caller registers for its own caller, and so on.
        **options: ``allow_override``.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        SignatureError: ``func`` cannot be called with the operator's arguments.
        RuntimeError: ``allow_override=False``, and the operator already has a fake kernel.

    >>> from fake.library import define, register_fake
    >>> define("doc_register::pairs", "(Tensor x) -> Tensor")
    >>> @register_fake("doc_register::pairs")
    ... def _(x):
    ...     return x.new_empty(x.shape[0], 2)
    >>> torch.ops.doc_register.pairs(torch.empty(3, device="meta")).shape
    torch.Size([3, 2])
    """
    custom, name = _resolve(op, "register_fake")
    if custom is not None:
        return custom.register_fake if func is None else custom.register_fake(func)
    namespace, op_name = _torch.parse_namespace(name)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        location = user_location(_stacklevel)
        call_at(location, library_for(namespace, lib)._register_fake, op_name, fn, **options)
        return fn

    return register if func is None else register(func)


def register_autograd(
    op: OpLike,
    backward: Callable[..., Any],
    /,
    *,
    setup_context: Callable[..., Any] | None = None,
    lib: torch.library.Library | None = None,
) -> None:
    """Register a backward formula, ``backward(ctx, *grads)``, and ``setup_context`` to save what it needs.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        backward: returns a gradient, or None, for each argument.
        setup_context: takes ``ctx``, ``inputs`` and ``output``.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        RuntimeError: the operator is not functional.
        NotImplementedError: a tensor argument is keyword-only.
        SignatureError: a function has the wrong signature.
    """
    custom, name = _resolve(op, "register_autograd")
    if custom is not None:
        custom.register_autograd(backward, setup_context=setup_context)
        return
    schema = _known_schema(name, "register_autograd")
    if _torch.is_functional_schema(schema) and not _torch.has_kwarg_only_tensors(schema):
        check_backward(name, backward, schema)
        if setup_context is not None:
            check_setup_context(name, setup_context, schema)
    namespace, _ = _torch.parse_namespace(name)
    torch.library.register_autograd(
        name, backward, setup_context=setup_context, lib=library_for(namespace, lib)
    )


def register_vmap(
    op: OpLike, func: Callable[..., Any] | None = None, /, *, lib: torch.library.Library | None = None
) -> Any:
    """Register ``func(info, in_dims, *args)`` → ``(outputs, out_dims)`` for ``torch.vmap``.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        func: the rule; if left out, a decorator is returned.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        SignatureError: ``func`` cannot be called that way.
    """
    custom, name = _resolve(op, "register_vmap")
    if custom is not None:
        return custom.register_vmap(func)
    namespace, _ = _torch.parse_namespace(name)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        check_vmap(name, fn, _known_schema(name, "register_vmap"))
        torch.library.register_vmap(name, fn, lib=library_for(namespace, lib))
        return fn

    return register if func is None else register(func)


def register_torch_dispatch(
    op: OpLike,
    torch_dispatch_class: Any,
    func: Callable[..., Any] | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Any:
    """Register ``func(mode_or_class, op, types, args, kwargs)`` for a torch_dispatch mode or tensor subclass.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        torch_dispatch_class: the mode or subclass.
        func: the rule; if left out, a decorator is returned.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        SignatureError: ``func`` does not take these five arguments.
        RegistrationError: ``torch_dispatch_class`` is not a class.
    """
    custom, name = _resolve(op, "register_torch_dispatch")
    check_dispatch_class(name, torch_dispatch_class)
    if custom is not None:
        return custom.register_torch_dispatch(torch_dispatch_class, func)
    namespace, op_name = _torch.parse_namespace(name)

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        check_torch_dispatch(name, fn)
        library_for(namespace, lib)._register_torch_dispatch_rule(op_name, torch_dispatch_class, fn)
        return fn

    return register if func is None else register(func)


def register_autocast(
    op: OpLike, device_type: str, cast_inputs: torch.dtype, /, *, lib: torch.library.Library | None = None
) -> Any:
    """Cast floating-point inputs to ``cast_inputs`` under autocast on ``device_type``.

    Args:
        op: the operator: its object, a `CustomOpDef` or its qualified name.
        device_type: such as ``"cuda"``.
        cast_inputs: the dtype.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        RegistrationError: ``cast_inputs`` is not a floating-point dtype.
        ValueError: the device type is unknown or has no autocast.
    """
    custom, name = _resolve(op, "register_autocast")
    check_cast(name, cast_inputs)
    if custom is not None:
        return custom.register_autocast(device_type, cast_inputs)
    _known_schema(name, "register_autocast")
    namespace, _ = _torch.parse_namespace(name)
    return torch.library.register_autocast(name, device_type, cast_inputs, lib=library_for(namespace, lib))


def register_effect(op: OpLike, effect: Any, *, lib: torch.library.Library | None = None) -> None:
    """Declare an operator's side effects (``EffectType.ORDERED``: compilers keep their order),
    or None for none.

    Args:
        op: the operator, or its name.
        effect: an ``EffectType``; None removes the effect.
        lib: the registration lives as long as this library.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        RegistrationError: ``effect`` is neither.
    """
    custom, name = _resolve(op, "register_effect")
    check_effect(name, effect)
    if custom is not None:
        custom.register_effect(effect)
        return
    namespace, _ = _torch.parse_namespace(name)
    library_for(namespace, lib)._register_effectful_op(name, effect)


def get_kernel(op: OpLike, dispatch_key: Any) -> Any:
    """Return the kernel that the dispatcher would run for a dispatch key;
    ``.call_boxed(keyset, *args)`` calls it.

    Raises:
        ValueError: the key is unknown, or ``op`` is not an operator.
        RuntimeError: the operator does not exist.
    """
    _, name = _resolve(op, "get_kernel")
    return torch.library.get_kernel(name, dispatch_key)  # type: ignore[attr-defined]


def get_ctx() -> Any:
    """Return the context of the running fake kernel; ``get_ctx().new_dynamic_size(min=0, max=None)`` creates
    a data-dependent size.

    Raises:
        MissingContextError: no fake kernel is running.
    """
    getter_result = _torch.fake_kernel_context()
    if getter_result is None:
        raise MissingContextError(
            "get_ctx() works only inside a fake kernel (register_fake) while it runs for fake tensors"
        )
    return getter_result


def impl_abstract(
    qualname: str, func: Callable[..., Any] | None = None, *, lib: Any = None, _stacklevel: int = 1
) -> Any:
    """Register a fake kernel, under the name that `fake.library.register_fake` had before torch 2.4.

    Args:
        qualname: ``"ns::name"``.
        func: the fake kernel; if left out, a decorator is returned.
        lib: the registration lives as long as this library.
    """
    warn_user("impl_abstract was renamed to register_fake; please use that", FutureWarning)
    return register_fake(qualname, func, lib=lib, _stacklevel=_stacklevel)
