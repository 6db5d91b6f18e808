"""The autograd side of a custom operator: the Function of the fast path, and operators without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fake.seam import library as _torch


def make_function(
    name: str,
    op: Any,
    converted: Callable[[Any], Any],
    is_alias: Callable[[], None],
    backward: Callable[..., Any] | None,
    setup_context: Callable[..., Any] | None,
    has_keyword_only: bool,
) -> Callable[..., Any]:
    """``apply(*positional arguments, (kernel, keyword-only arguments))`` of a `torch.autograd.Function`.

    The Function mirrors the one that torch puts behind the Autograd dispatch key, down to the one extra
    argument that carries what is not differentiated: gradients, ``needs_input_grad`` and error messages agree.

    Args:
        name: the class's name, which error messages show.
        op: the operator, for messages.
        converted: takes what the kernel returned where it is no tensor; returns the form in which the dispatcher does, or raises.
        is_alias: raises because what the kernel returned shares memory with an input.
        backward: the user's formula, or None where there is none.
        setup_context: what the user saves for it, or None.
        has_keyword_only: whether ``setup_context`` gets keyword-only arguments.
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
                result = converted(result)
            if any_output_is_alias(args, empty, result if type(result) is tuple else (result,)):
                is_alias()
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
    # Function.apply's Python prelude handles functorch, which the fast path has excluded by then.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _without_last_input(backward: Callable[..., Any], ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a backward formula, which knows nothing of the last input: that is ours."""
    before = ctx.needs_input_grad
    ctx.needs_input_grad = before[:-1]
    try:
        result = backward(ctx, *grads)
    finally:
        ctx.needs_input_grad = before
    return (*result, None) if isinstance(result, tuple) else (result, None)


@dataclass(frozen=True)
class _Call:
    """What a call has besides the arguments that may have gradients: one leaf, in which nobody looks for tensors."""

    keyset: Any
    given: int
    keyword_only: dict[str, Any]


_ABSENT = torch.empty(0)
"""Stands for None in a list of optional tensors on its way through autograd."""


def list_kernel(op: Any, registered: Any) -> Callable[..., Any]:
    """The Autograd kernel of an operator that takes lists of tensors.

    It differs from torch's in two calls that torch gets wrong: a list with None among its tensors has gradients (torch's
    asks for those of lists without one only, and gives none), and arguments that were left out stand where the
    backward formula has their gradients (torch 2.13 refuses the formula's result then).

    Args:
        op: the overload.
        registered: the operator's object, with the formulas that are registered by then.
    """
    schema = op._schema
    has_keyword_only = any(argument.kwarg_only for argument in schema.arguments)

    def forward(ctx: Any, *args: Any) -> Any:
        call = args[-1]
        args = tuple(map(_with_none, args[:-1]))
        with _torch.BelowAutograd():
            keys = call.keyset & _torch.after_autograd_keyset
            result = op.redispatch(keys, *args[: call.given], **call.keyword_only)
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
        filled = tuple(map(_without_none, args))
        if not (torch.is_grad_enabled() and _torch.any_requires_grad(*filled)):
            with _torch.BelowAutograd():
                return op.redispatch(keyset & _torch.after_autograd_keyset, *args, **kwargs)
        filled, _ = _torch.fill_defaults(schema, filled, kwargs)
        return function.apply(*filled, _Call(keyset, len(args), kwargs))

    return kernel


def _without_none(argument: Any) -> Any:
    """A list with tensors and None as one of tensors alone."""
    if isinstance(argument, list) and any(isinstance(one, torch.Tensor) for one in argument):
        return [_ABSENT if one is None else one for one in argument]
    return argument


def _with_none(argument: Any) -> Any:
    return [None if one is _ABSENT else one for one in argument] if isinstance(argument, list) else argument


def non_differentiable_kernel(op: Any) -> Callable[..., Any]:
    """An Autograd kernel that records nothing: the outputs never require a gradient."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _torch.BelowAutograd():
            return op.redispatch(keyset & _torch.after_autograd_keyset, *args, **kwargs)

    return kernel
