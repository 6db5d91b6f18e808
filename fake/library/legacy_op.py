"""`CustomOp`: the operator object of the old API (see `fake.library.legacy`)."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fake.library import _torch
from fake.library.errors import RegistrationError, SchemaError, UnknownOpError
from fake.library.legacy_autograd import make_autograd_kernel
from fake.library.library import Library
from fake.library.place import users_place

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
        self._impls[kind] = _Registered(fn, str(users_place()))

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
            self._library.impl(self._name, make_autograd_kernel(self), "Autograd")

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
