"""What a captured graph calls at run time around an inlined backward graph of AOTAutograd.

AOTAutograd calls its backward graph with the values saved by the forward and one gradient ("tangent") per
output, each in the layout that was traced. Tensor subclasses are unwrapped before and rewrapped after.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.runtime import functional
from compiled_autograd.runtime.running import running

_VIEW, _RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default

Grad = torch.Tensor | None


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return the gradient of an output that the backward pass does not reach. Args: those of the output."""
    return torch.zeros(tuple(sizes), dtype=dtype, device=device)


def tangent(
    grad: Grad,
    missing: tuple[Sequence[int], torch.dtype, str] | None,
    memory_format: torch.memory_format | None,
    size: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Grad:
    """Convert a gradient to the layout that the backward graph was traced for.

    Args:
        grad: the gradient of one output; None if it is missing.
        missing: sizes, dtype and device of the zeros that replace a missing one; None if it is never missing.
        memory_format: its layout, for a graph with symbolic sizes.
        size: its sizes, for any other graph.
        stride: its strides, for any other graph.

    Returns:
        ``grad`` itself if it fits, else a copy.
    """
    if grad is None:
        if missing is None:
            return None
        grad = zeros(*missing)
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return _torch.coerce_tangent(grad, memory_format, size, stride)
    if memory_format is not None:
        return grad.contiguous(memory_format=memory_format)
    if grad.shape == size and grad.stride() == stride:
        return grad
    assert size is not None  # sizes and strides are given if the memory format is not
    assert stride is not None
    return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def stashed_tensors(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return saved tensors that a compiled function keeps on its context, hidden from the engine."""
    return tuple(getattr(ctx, "_tensors_no_vc_check", None) or ())


def prologue(ctx: Any, saved: Sequence[Any], grads: Sequence[Any], *, node: int) -> list[Any]:
    """Return all arguments, unwrapped, of the backward graph of a function on tensor subclasses.

    Args:
        ctx: the function's context.
        saved: its saved tensors.
        grads: the gradients of its outputs, None for missing ones.
        node: the index of its node in the pass.
    """
    running.enter(node)
    gradients = list(functional.materialize(ctx, grads))
    return _torch.prologue_arguments(
        _torch.function_of(ctx), tuple(saved), ctx.symints, getattr(ctx, "opaque_objects", ()), gradients
    )


def epilogue(ctx: Any, results: Sequence[Any], *, node: int) -> tuple[Grad, ...]:
    """Assemble such a graph's results: one gradient per input. Args: see :func:`prologue`."""
    running.enter(node)
    return _torch.epilogue_results(_torch.function_of(ctx), results)


def target_on_real_tensors(node: fx.Node) -> Callable[..., Any]:
    """Return the function to run for a node of a backward graph: ``view`` becomes ``reshape``.

    The compiled forward chose the layout of what it saved, so a view that was valid when traced may be
    invalid.
    """
    assert callable(node.target)  # the graph calls functions only
    return _RESHAPE if node.target is _VIEW else node.target


class _OnRealTensors(fx.Interpreter):
    """Interprets a backward graph as traced."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return target_on_real_tensors(n)(*args, **kwargs)


def call_backward_with_state(
    ctx: Any, saved: tuple[Any, ...], grads: Sequence[Any], state: Any, *, node: int
) -> tuple[Grad, ...]:
    """`functional.call_backward` for a function with hooks traced by Dynamo, which AOTAutograd rejects.

    Args:
        ctx: the context of the function.
        saved: its saved tensors, or (hook, packed) pairs.
        grads: one gradient, or a placeholder for zeros, per output.
        state: Dynamo's object that holds the hooks. The context drops it when its tensors are freed.
        node: the index of the autograd node.

    Raises:
        RuntimeError: under ``create_graph``, as saved values have no history; or if the graph draws from
            seeds.
    """
    running.enter(node)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward, here of a function with "
            "hooks that it traced: call backward without create_graph, or register the hooks outside of the function"
        )
    function = _torch.function_of(ctx)
    tensors = [functional.unpack(value) for value in saved]
    tensors += stashed_tensors(ctx)
    gradients = list(functional.materialize(ctx, grads))
    objects = getattr(ctx, "opaque_objects", ())
    arguments = _torch.prologue_arguments(function, tensors, ctx.symints, objects, gradients)
    module = _torch.backward_module(function)
    if isinstance(module, str):
        raise RuntimeError(
            f"a compiled function with hooks that torch.compile traced cannot be run: {module}"
        )
    if _torch.has_seeded_random_ops(module):
        raise RuntimeError(
            "a compiled function with hooks that torch.compile traced draws the forward's random numbers again in its backward "
            "pass, which only Inductor's code can: set torch._inductor.config.fallback_random, or register the hooks outside of it"
        )
    with _torch.autocast_disabled():
        results = _OnRealTensors(module).run(*arguments, state)
    return _torch.epilogue_results(function, results)
