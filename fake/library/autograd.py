"""The autograd side of a custom operator: the Function of the fast path, and operators without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.seam import library as _torch

#: Class decorator: an ``autograd.Function`` that takes and returns lists of tensors. torch's own.
supports_tensorlist = _torch.supports_tensorlist


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
        needs_input_grad = ctx.needs_input_grad
        ctx.needs_input_grad = needs_input_grad[:-1]
        try:
            result = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs_input_grad
        if isinstance(result, tuple):
            return (*result, None)
        return result, None

    members = {"forward": staticmethod(forward), "backward": staticmethod(run_backward)}
    function = type(name, (torch.autograd.Function,), members)
    # Function.apply's Python prelude handles functorch, which the fast path has excluded by then.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def non_differentiable_kernel(op: Any) -> Callable[..., Any]:
    """An Autograd kernel that records nothing: the outputs never require a gradient."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _torch.BelowAutograd():
            return op.redispatch(keyset & _torch.after_autograd_keyset, *args, **kwargs)

    return kernel
