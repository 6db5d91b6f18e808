"""Autograd for custom operators: the fast path's Function, list arguments, operators without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fake.seam import library as _torch


def make_function(
    name: str,
    op: Any,
    convert_result: Callable[[Any], Any],
    raise_alias_error: Callable[[], None],
    backward: Callable[..., Any] | None,
    setup_context: Callable[..., Any] | None,
    has_keyword_only: bool,
) -> Callable[..., Any]:
    """Return ``apply`` of a `torch.autograd.Function`:
    ``apply(*positional arguments, (kernel, keyword-only arguments))``.

    The Function mirrors the one that torch puts behind the Autograd dispatch key, including the one extra
    argument that carries the non-differentiable parts: gradients, ``needs_input_grad`` and error messages
    agree.

    Args:
        name: the class's name, as shown in error messages.
        op: the operator, for messages.
        convert_result: converts a kernel's result that is not a tensor to the form that the
            dispatcher returns, or raises.
        raise_alias_error: raises the error for a result that shares memory with an input.
        backward: the user's formula, or None.
        setup_context: saves what ``backward`` needs, or None.
        has_keyword_only: whether ``setup_context`` takes keyword-only arguments.
    """

    below_autograd, any_output_is_alias = _torch.BelowAutograd, _torch.any_output_is_alias
    tensor, empty = torch.Tensor, {}  # type: ignore[var-annotated]

    def forward(ctx: Any, *args: Any) -> Any:
        kernel, keyword_only = args[-1]
        args = args[:-1]
        guard = below_autograd()
        try:
            result = kernel(*args, **keyword_only)
            if type(result) is not tensor:
                result = convert_result(result)
            if any_output_is_alias(args, empty, result if type(result) is tuple else (result,)):
                raise_alias_error()
            if setup_context is not None:
                if has_keyword_only:
                    setup_context(ctx=ctx, inputs=args, keyword_only_inputs=keyword_only, output=result)
                else:
                    setup_context(ctx=ctx, inputs=args, output=result)
        finally:
            del guard
        return result

    def run_backward(ctx: Any, *grads: Any) -> Any:
        if backward is None:
            raise RuntimeError(
                f"Trying to backward through {op} but no autograd formula was registered. "
                f"Please use register_autograd to add one."
            )
        return _without_last_input(backward, ctx, grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(run_backward)}
    function = type(name, (torch.autograd.Function,), members)
    # Function.apply's Python prelude handles functorch, which the fast path has already excluded.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _without_last_input(backward: Callable[..., Any], ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a backward formula without the last input, which is ours: the formula does not know of it."""
    before = ctx.needs_input_grad
    ctx.needs_input_grad = before[:-1]
    try:
        result = backward(ctx, *grads)
    finally:
        ctx.needs_input_grad = before
    return (*result, None) if isinstance(result, tuple) else (result, None)


@dataclass(frozen=True)
class _CallParts:
    """The parts of a call that cannot have gradients: one pytree leaf, which is not searched for tensors."""

    keyset: Any
    passed_count: int
    keyword_only: dict[str, Any]


_NONE_PLACEHOLDER = torch.empty(0)
"""Stands for None in a list of optional tensors while it passes through autograd."""


def list_kernel(op: Any, registered: Any) -> Callable[..., Any]:
    """Return the Autograd kernel of an operator that takes lists of tensors.

    It differs from torch's in two kinds of calls that torch gets wrong. A list with None among its tensors
    gets gradients (torch only requests them for lists without None). Arguments left out of the call keep
    their place, where the backward formula returns their gradients (torch 2.13 then refuses the formula's
    result).

    Args:
        op: the overload.
        registered: the operator's object; its formulas are read at call time.
    """
    schema = op._schema
    has_keyword_only = any(argument.kwarg_only for argument in schema.arguments)

    def forward(ctx: Any, *args: Any) -> Any:
        call = args[-1]
        args = tuple(map(_restore_none, args[:-1]))
        with _torch.BelowAutograd():
            keys = call.keyset & _torch.after_autograd_keyset
            result = op.redispatch(keys, *args[: call.passed_count], **call.keyword_only)
            setup_context = registered._setup_context_fn
            if setup_context is not None:
                _, filled = _torch.fill_defaults(schema, args, call.keyword_only)
                more = {"keyword_only_inputs": filled} if has_keyword_only else {}
                setup_context(ctx=ctx, inputs=args, output=result, **more)
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        if registered._backward_fn is None:
            raise RuntimeError(
                f"Trying to backward through {op} but no autograd formula was registered. "
                f"Please use register_autograd to add one."
            )
        return _without_last_input(registered._backward_fn, ctx, grads)

    name = f"GeneratedBackwardFor_{op._namespace}_{op._opname}_{op._overloadname}"
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = _torch.supports_tensorlist(type(name, (torch.autograd.Function,), members))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        filled = tuple(map(_replace_none, args))
        if not (torch.is_grad_enabled() and _torch.any_requires_grad(*filled)):
            with _torch.BelowAutograd():
                return op.redispatch(keyset & _torch.after_autograd_keyset, *args, **kwargs)
        filled, _ = _torch.fill_defaults(schema, filled, kwargs)
        return function.apply(*filled, _CallParts(keyset, len(args), kwargs))

    return kernel


def _replace_none(argument: Any) -> Any:
    """Replace None in a list that also holds tensors, so that it holds tensors only."""
    if isinstance(argument, list) and any(isinstance(item, torch.Tensor) for item in argument):
        return [_NONE_PLACEHOLDER if item is None else item for item in argument]
    return argument


def _restore_none(argument: Any) -> Any:
    return (
        [None if item is _NONE_PLACEHOLDER else item for item in argument]
        if isinstance(argument, list)
        else argument
    )


def non_differentiable_kernel(op: Any) -> Callable[..., Any]:
    """Return an Autograd kernel that records nothing: the outputs never require a gradient."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _torch.BelowAutograd():
            return op.redispatch(keyset & _torch.after_autograd_keyset, *args, **kwargs)

    return kernel
