"""`CustomOp`: the operator object of the old API (see `fake.library.legacy`)."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fake.library import _torch
from fake.library.errors import RegistrationError, SchemaError, UnknownOpError
from fake.library.library import Library
from fake.library.location import user_location

__all__ = ["DEVICE_KEYS", "CustomOp", "find_op"]

#: The device types that this API supports.
DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class _Registered:
    function: Callable[..., Any]
    location: str


class CustomOp:
    """An operator of the old API. Made by `object_custom_op` and `custom_op`; lives until `_destroy`."""

    alive: dict[str, CustomOp] = {}

    def __init__(
        self, qualname: Any, schema: Any, library: Any, *_: Any, _private_access: bool = False
    ) -> None:
        if not _private_access:
            raise RuntimeError(
                "The CustomOp constructor is private. Please use custom_op(...) to create a CustomOp"
            )
        self._qualname: str = qualname
        self._name = qualname.split("::")[1]
        self._schema = schema
        self._library: Library = library
        self._impls: dict[str, _Registered] = {}
        self._autograd_registered = False
        self.output_differentiability: list[bool] | None = None
        self.arguments = namedtuple(f"{self._name}_args", [a.name for a in schema.arguments])  # type: ignore[misc]
        CustomOp.alive[qualname] = self

    def __repr__(self) -> str:
        return f'<CustomOp(op="{self._qualname}")>'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator. Raises NotImplementedError where no implementation fits."""
        return self.overload(*args, **kwargs)

    @property
    def overload(self) -> Any:
        """The dispatcher's operator."""
        return find_op(self._qualname)

    def location(self, kind: str) -> str:
        """``file:line`` of a registration."""
        return self._impls[kind].location

    def _record(self, kind: str, fn: Callable[..., Any]) -> None:
        if kind in self._impls:
            raise RegistrationError(
                f"Attempting to register a {kind} impl for operator {self._qualname} that already has a {kind} impl "
                f"registered from Python at {self._impls[kind].location}. This is not supported.",
                op=self._qualname,
            )
        self._impls[kind] = _Registered(fn, str(user_location()))

    def impl(self, device_types: str | Iterable[str]) -> Callable[..., Any]:
        """Decorator for the kernel of one or more device types.

        Raises:
            ValueError: a device type that this API does not support.
            RegistrationError: there is a kernel already.
        """
        types = [device_types] if isinstance(device_types, str) else list(device_types)
        for device_type in types:
            if device_type not in DEVICE_KEYS:
                raise SchemaError(
                    f"{self._qualname}: device_types=[{device_type}, ...]: we only support device_type in "
                    f"{list(DEVICE_KEYS)}.",
                    op=self._qualname,
                )

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            for device_type in dict.fromkeys(types):
                key = DEVICE_KEYS[device_type]
                if device_type not in self._impls and _torch.has_computed_kernel_for_key(self._qualname, key):
                    raise RegistrationError(
                        f"impl(..., device_types={device_type}): the operator {self._qualname} already has an "
                        "implementation for this device type via a pre-existing torch.library or TORCH_LIBRARY "
                        "registration.",
                        op=self._qualname,
                    )
                self._record(device_type, fn)
                self._library.impl(self._name, fn, key)
            return fn

        return wrap

    def impl_factory(self) -> Callable[..., Any]:
        """Decorator for the kernel of an operator without tensor arguments."""

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._record("factory", fn)
            self._library.impl(self._name, fn, "BackendSelect")
            return fn

        return wrap

    def impl_fake(self) -> Callable[..., Any]:
        """Decorator for the fake kernel."""

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._record("fake", fn)
            self._library._register_fake(self._name, fn)
            return fn

        return wrap

    impl_abstract = impl_fake

    def impl_save_for_backward(self) -> Callable[..., Any]:
        """Decorator for ``save(inputs, output)``; ``inputs`` is a named tuple, the result is ``saved``."""
        return self._impl_half("save_for_backward", None)

    def impl_backward(self, output_differentiability: list[bool] | None = None) -> Callable[..., Any]:
        """Decorator for ``backward(ctx, saved, *grads)``, which returns a dict from argument names to gradients.

        Raises:
            RuntimeError: ``output_differentiability`` is not a list of one bool an output.
        """
        if output_differentiability is not None and (
            not isinstance(output_differentiability, list)
            or not all(isinstance(d, bool) for d in output_differentiability)
            or len(output_differentiability) != len(self._schema.returns)
        ):
            raise RegistrationError(
                "impl_backward(output_differentiability): expected output_differentiability to be a list of bools "
                f"with length equal to the number of outputs of this CustomOp got: {output_differentiability}",
                op=self._qualname,
            )
        return self._impl_half("backward", output_differentiability)

    def _impl_half(self, kind: str, differentiability: list[bool] | None) -> Callable[..., Any]:
        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._check_backward_allowed()
            self._record(kind, fn)
            if kind == "backward":
                self.output_differentiability = differentiability
            self.register_autograd_kernel()
            return fn

        return wrap

    def _check_backward_allowed(self) -> None:
        def refuse(detail: str) -> None:
            raise RegistrationError(
                f"Cannot use this API to register backward formula for {detail}. Got operator {self._qualname} with "
                f"schema: {self._schema}",
                op=self._qualname,
            )

        if self._schema.is_mutable:
            refuse("non-functional operator")
        if not self._schema.returns:
            refuse("operator with no returns")
        if any(r.alias_info is not None and not r.alias_info.is_write for r in self._schema.returns):
            refuse("operator that returns views")
        if self._autograd_registered:
            return
        for key in ("CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA"):
            if _torch.has_kernel_for_key(self._qualname, key):
                raise RegistrationError(
                    f"impl_backward/impl_save_for_backward: the operator {self._qualname} already has a kernel "
                    f"registered to DispatchKey::{key} via a pre-existing torch.library or TORCH_LIBRARY "
                    "registration. Please either remove it or don't use this API",
                    op=self._qualname,
                )

    def register_autograd_kernel(self) -> None:
        """Put the kernel that looks at the registrations when it is called behind the Autograd key; once."""
        if not self._autograd_registered:
            self._autograd_registered = True
            self._library.impl(self._name, _autograd_kernel(self), "Autograd")

    def registered(self, kind: str) -> Callable[..., Any] | None:
        """The function registered as ``kind``, or None."""
        found = self._impls.get(kind)
        return None if found is None else found.function

    def _destroy(self) -> None:
        self._library._destroy()
        CustomOp.alive.pop(self._qualname, None)


def find_op(qualname: str) -> Any:
    """The dispatcher's operator of that name.

    Raises:
        UnknownOpError: there is none.
    """
    try:
        return _torch.lookup_op(qualname)
    except AttributeError as error:
        raise UnknownOpError(
            f"Could not find the operator {qualname}. Please make sure you have already registered the operator and "
            "(if registered from C++) loaded it via torch.ops.load_library.",
            op=qualname,
        ) from error


# --- autograd: saved values as a tree, gradients as a dict, both checked with names ------------------
def _autograd_kernel(op: CustomOp) -> Callable[..., Any]:
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
            isinstance(a, torch.Tensor) and a.requires_grad for a in _torch.pytree.tree_leaves((args, kwargs))
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
    flat_args, args_spec = _torch.pytree.tree_flatten(args)
    out_spec: Any = None

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            nonlocal out_spec
            ctx.set_materialize_grads(True)
            inputs = _torch.pytree.tree_unflatten(list(flat), args_spec)
            with _torch.BelowAutograd():
                output = op.overload(*inputs)
            kinds = op.arguments(*_torch.pytree.tree_map(type, inputs))
            _save(ctx, (save(op.arguments(*inputs), output), kinds))
            _mark_non_differentiable(ctx, output, op.output_differentiability)
            flat_output, out_spec = _torch.pytree.tree_flatten(output)
            return tuple(flat_output)

        @staticmethod
        def backward(ctx: Any, *flat_grads: Any) -> Any:
            grads = _torch.pytree.tree_unflatten(list(flat_grads), out_spec)
            saved, kinds = _unpack(ctx)
            result = backward(object(), saved, *(grads if isinstance(grads, tuple) else (grads,)))
            _check_grads(op, result, kinds)
            flat: list[Any] = []
            for name, kind in kinds._asdict().items():
                flat += _torch.pytree.tree_leaves(
                    [result[name]] if name in result else [_torch.pytree.tree_map(lambda _: None, kind)],
                    is_leaf=lambda value: value is None,
                )
            return tuple(flat)

    _Function.__name__ = _Function.__qualname__ = f"{op._name}_customop"
    output = _Function.apply(*flat_args)
    return _torch.pytree.tree_unflatten(list(output), out_spec)


def _save(ctx: Any, tree: Any) -> None:
    leaves, ctx.spec = _torch.pytree.tree_flatten(tree)
    ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    ctx.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]


def _unpack(ctx: Any) -> Any:
    tensors = iter(ctx.saved_tensors)
    leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
    return _torch.pytree.tree_unflatten(leaves, ctx.spec)


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
