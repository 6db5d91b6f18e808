"""Autograd of the old API: saved values as a tree, gradients as a dict, both checked with names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fake.library import _torch
from fake.library.errors import RegistrationError

if TYPE_CHECKING:
    from fake.library.legacy_op import CustomOp

__all__ = ["make_autograd_kernel"]

pytree = _torch.pytree


def make_autograd_kernel(op: CustomOp) -> Callable[..., Any]:
    """The kernel behind the Autograd key: looks at what is registered each time it is called."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        save, backward = op.registered("save_for_backward"), op.registered("backward")
        if save is not None and backward is not None:
            return _apply(op, save, backward, args)
        if save is not None or backward is not None:
            found, missing = (
                ("backward", "save_for_backward") if backward else ("save_for_backward", "backward")
            )
            raise RegistrationError(
                f"We found a '{found}' registration for {op} at {op.location(found)} but were unable to find a "
                f"'{missing}' registration. Please provide both, via impl_backward and impl_save_for_backward.",
                op=op._qualname,
            )
        needs_grad = any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in pytree.tree_leaves((args, kwargs))
        )
        if torch.is_grad_enabled() and needs_grad:
            raise RegistrationError(
                "Autograd has not been implemented for operator " + op._qualname, op=op._qualname
            )
        with _torch.BelowAutograd():
            return op.overload(*args, **kwargs)

    return kernel


def _apply(
    op: CustomOp, save: Callable[..., Any], backward: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    flat_args, args_spec = pytree.tree_flatten(args)
    out_spec: Any = None

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            nonlocal out_spec
            ctx.set_materialize_grads(True)
            inputs = pytree.tree_unflatten(list(flat), args_spec)
            with _torch.BelowAutograd():
                output = op.overload(*inputs)
            kinds = op.arguments(*pytree.tree_map(type, inputs))
            _save(ctx, (save(op.arguments(*inputs), output), kinds))
            _mark_non_differentiable(ctx, output, op.output_differentiability)
            flat_output, out_spec = pytree.tree_flatten(output)
            return tuple(flat_output)

        @staticmethod
        def backward(ctx: Any, *flat_grads: Any) -> Any:
            grads = pytree.tree_unflatten(list(flat_grads), out_spec)
            saved, kinds = _unpack(ctx)
            result = backward(object(), saved, *(grads if isinstance(grads, tuple) else (grads,)))
            _check_grads(op, result, kinds)
            flat: list[Any] = []
            for name, kind in kinds._asdict().items():
                flat += pytree.tree_leaves(
                    [result[name]] if name in result else [pytree.tree_map(lambda _: None, kind)],
                    is_leaf=lambda value: value is None,
                )
            return tuple(flat)

    _Function.__name__ = _Function.__qualname__ = f"{op._name}_customop"
    output = _Function.apply(*flat_args)
    return pytree.tree_unflatten(list(output), out_spec)


def _save(ctx: Any, tree: Any) -> None:
    leaves, ctx.spec = pytree.tree_flatten(tree)
    ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    ctx.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]


def _unpack(ctx: Any) -> Any:
    tensors = iter(ctx.saved_tensors)
    leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
    return pytree.tree_unflatten(leaves, ctx.spec)


def _mark_non_differentiable(ctx: Any, output: Any, differentiability: list[bool] | None) -> None:
    if differentiability is None:
        return
    marked: list[torch.Tensor] = []
    outputs = output if isinstance(output, tuple) else (output,)
    for index, (differentiable, value) in enumerate(zip(differentiability, outputs, strict=True)):
        if isinstance(value, (torch.Tensor, list)):
            if not differentiable:
                marked += value if isinstance(value, list) else [value]
        elif differentiable:
            raise RegistrationError(
                f"With output_differentiability={differentiability}. At idx {index}, we received an object of type "
                f"{type(value)} that is not a Tensor, so it cannot have be marked as differentiable."
            )
    if marked:
        ctx.mark_non_differentiable(*marked)


def _check_grads(op: CustomOp, grads: Any, kinds: Any) -> None:
    def refuse(what: str) -> None:
        raise RegistrationError(
            f"In the backward function defined for {op} at {op.location('backward')}, {what}", op=op._qualname
        )

    if not isinstance(grads, dict):
        refuse(f"expected the output of the backward function to be a dict but got {type(grads)}")
    expected = {
        a.name
        for a in op._schema.arguments
        if _torch.is_tensor_like_type(a.type) or _torch.is_tensorlist_like_type(a.type)
    }
    if expected != grads.keys():
        refuse(
            f"expected the returned grad_input dict to have keys {expected} but got {grads.keys()}. The backward "
            "function must return a gradient (can be None) for each arg to the CustomOp that may be a Tensor or "
            "Sequence[Tensor]. Args declared to be non-Tensor-like types should not appear in the grad_input dict"
        )
    for name, grad in grads.items():
        kind = getattr(kinds, name)
        where = f"for input '{name}' expected the grad_input dict to hold a list of"
        if isinstance(kind, list):
            if not isinstance(grad, (tuple, list)):
                refuse(f"{where} gradients but got object of type {type(grad)}.")
            if len(grad) != len(kind):
                refuse(f"{where} {len(kind)} gradients but got {len(grad)}")
            for index, (one, one_kind) in enumerate(zip(grad, kind, strict=True)):
                if one is not None and not isinstance(one, torch.Tensor):
                    refuse(f"{where} None or Tensor gradients but got object of {type(one)} at index {index}")
                if one is not None and not issubclass(one_kind, torch.Tensor):
                    refuse(
                        f"for input '{name}', value {index} was not a Tensor, so its gradient must be None"
                    )
        elif grad is not None and not isinstance(grad, torch.Tensor):
            refuse(
                f"got object of type {type(grad)} as the gradient for input '{name}', but expected the gradient to be "
                "either None or a Tensor"
            )
        elif grad is not None and not issubclass(kind, torch.Tensor):
            refuse(f"got a Tensor as the gradient for input '{name}', which was not a Tensor (it was {kind})")
