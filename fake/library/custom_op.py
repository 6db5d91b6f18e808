"""`custom_op`: turn a Python function into an operator of the dispatcher.

>>> import torch
>>> from fake.library import custom_op
>>> @custom_op("doc_custom_op::scale", mutates_args=())
... def scale(x: torch.Tensor, by: float) -> torch.Tensor:
...     return torch.from_numpy(x.numpy() * by)
>>> @scale.register_fake
... def _(x, by):
...     return torch.empty_like(x)
>>> scale.register_autograd(
...     lambda ctx, grad: (grad * ctx.by, None),
...     setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
... )
>>> x = torch.ones(2, requires_grad=True)
>>> scale(x, 3.0).sum().backward()
>>> x.grad
tensor([3., 3.])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from fake.library.argument_checks import device_list, dispatch_key, tags_of
from fake.library.argument_types import ArgumentLayout, needs_layout
from fake.library.errors import DuplicateOpError, OpReplacedWarning, SchemaError, UnknownOpError
from fake.library.location import warn_user
from fake.library.op_def import CustomOpDef, DeviceTypes
from fake.library.registrations import registry
from fake.library.schema import (
    check_nameless,
    check_namespace,
    infer_schema,
    mutated_arguments,
    normalize_mutates_args,
    parse,
    split_qualname,
)
from fake.library.signatures import check_kernel
from fake.seam import library as _torch

Tags = torch.Tag | Sequence[torch.Tag] | None


@overload
def custom_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    differentiable: bool = True,
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator form. Args: those of the implementation."""


@overload
def custom_op(
    name: str,
    fn: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    differentiable: bool = True,
) -> CustomOpDef:
    """Function form. Args: those of the implementation."""


def custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    differentiable: bool = True,
) -> Any:
    """Turn a function with type annotations into an operator; without ``fn``, return a decorator.

    Args:
        name: ``"namespace::name"`` or ``"namespace::name.overload"``.
        fn: the kernel, for ``device_types`` or for all devices.
        mutates_args: names of the arguments that ``fn`` mutates, or ``"unknown"`` for all tensors.
        device_types: the device types that ``fn`` is for; None makes it the default for all of them.
        schema: the schema without the name, instead of one inferred from the annotations.
        tags: tags of the operator (``torch.Tag.inplace`` and ``torch.Tag.out`` where torch has them).
        differentiable: False declares that there is no gradient: outputs never require one, and
            `CustomOpDef.register_autograd` is refused.

    Raises:
        SchemaError: ``name``, ``schema`` or ``mutates_args`` is invalid (with subclasses for reserved
            namespaces and unsupported annotations). Nothing has been defined in this case.
        SignatureError: ``fn`` cannot be called the way ``schema`` says.
        RegistrationError: a device type is invalid. Nothing has been defined in this case, either.
        NotImplementedError: a tensor argument is keyword-only (the autograd engine cannot see it).
        DuplicateOpError: an operator of that name was defined by other means.
    """

    namespace, _ = split_qualname(name)
    check_namespace(namespace)
    mutated = normalize_mutates_args(mutates_args, name)
    if not isinstance(differentiable, bool):
        raise SchemaError(f"{name}: differentiable is {differentiable!r}; pass True or False", op=name)

    def wrap(fn: Callable[..., Any]) -> CustomOpDef:
        return _make(name, fn, mutated, device_types, schema, tags, differentiable)

    return wrap if fn is None else wrap(fn)


def _make(
    qualname: str,
    fn: Callable[..., Any],
    mutates_args: str | tuple[str, ...],
    device_types: DeviceTypes,
    schema: str | None,
    tags: Tags,
    differentiable: bool,
) -> CustomOpDef:
    """Make the schema and check it against the function, then replace an earlier definition."""
    namespace, name = split_qualname(qualname)
    normalized = tags_of(qualname, tags)
    for device_type in [] if device_types is None else device_list(qualname, device_types):
        dispatch_key(qualname, device_type)
    layout = None
    if schema is None:
        if needs_layout(fn):
            layout = ArgumentLayout(qualname, fn)
            schema_text = layout.schema(mutates_args)
        else:
            schema_text = infer_schema(fn, mutates_args=mutates_args, tags=normalized)
    else:
        if not str(schema).startswith("("):
            check_nameless(schema, f"custom_op({qualname!r}, schema=...)", qualname)
        schema_text = schema
    parsed = parse(f"{qualname}{schema_text}", op=qualname)
    if schema is not None:
        mutated = set(mutated_arguments(parsed))
        if mutates_args != "unknown" and mutated != set(mutates_args):
            raise SchemaError(
                f"Attempted to create a custom op with `mutates_args={mutates_args}` and `schema={schema}`. The schema "
                f"suggests that the op mutates {mutated or '{}'} which is different from what was provided to us in "
                "`mutates_args`. Please make these consistent.",
                op=qualname,
            )
        check_kernel(qualname, "kernel", fn, parsed)
    if _torch.has_kwarg_only_tensors(parsed) and _torch.OUT_TAG not in normalized:
        raise NotImplementedError(
            f"custom_op with kwarg-only Tensor args. Please make your tensors not kwarg-only. Got: {schema_text}"
        )
    _destroy_earlier(qualname)
    try:
        op = CustomOpDef._create(namespace, name, schema_text, fn, normalized, layout, differentiable)
    except RuntimeError as error:
        if "multiple times" not in str(error):
            raise
        _torch.take_library(qualname)
        raise DuplicateOpError(
            f"{qualname} is defined already, by a library that custom_op cannot replace: {error}", op=qualname
        ) from error
    op.register_kernel(device_types)(fn)
    registry.add_op(op)
    return op


def _destroy_earlier(qualname: str) -> None:
    if registry.find(qualname) is None and qualname not in _torch.OPDEFS:
        return
    warn_user(
        f"{qualname} is registered again; the earlier operator is gone, with its kernels, and cannot be called",
        OpReplacedWarning,
    )
    registry.destroy(qualname)


def destroy(op: CustomOpDef | str) -> bool:
    """Remove a custom operator. Returns whether it existed. Using its object afterwards raises.

    Raises:
        OpDestroyedError: never raised here, but by later uses of the object.
        UnknownOpError: ``op`` is neither an operator object nor a name.
    """
    if not isinstance(op, CustomOpDef | str):
        raise UnknownOpError(
            f"destroy: {op!r} is no operator; pass what custom_op returned, or its name, 'ns::name'"
        )
    if isinstance(op, CustomOpDef) and registry.find(op.qualname) is not op:
        return False  # another operator may have the name now
    return registry.destroy(op if isinstance(op, str) else op.qualname)
