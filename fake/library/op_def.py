"""`CustomOpDef`: a custom operator and everything registered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fake.library.argument_checks import (
    check_cast,
    check_dispatch_class,
    check_effect,
    device_list,
    dispatch_key,
)
from fake.library.argument_types import ArgumentLayout
from fake.library.autograd import list_kernel, non_differentiable_kernel
from fake.library.call_arguments import argument_type
from fake.library.errors import OpDestroyedError, RegistrationError
from fake.library.fast_call import FastCall
from fake.library.location import call_at, user_location
from fake.library.registrations import Registered, registry
from fake.library.returns import checked_fake_kernel, checked_kernel
from fake.library.schema import is_functional_schema, is_tensorlist_like_type
from fake.library.signatures import (
    as_schema,
    check_backward,
    check_kernel,
    check_setup_context,
    check_torch_dispatch,
    check_vmap,
    fill_missing_defaults,
    signature_of,
)
from fake.seam import library as _torch

DeviceTypes = str | Sequence[str] | None


class CustomOpDef(_torch.TorchCustomOpDef):
    """A custom operator, created by `custom_op`; accepted wherever torch accepts a ``CustomOpDef``.

    Attributes:
        differentiable: whether the operator takes part in autograd.
        layout: how extended argument types are flattened, or None.
        fast_call: the call path that skips the dispatcher.
    """

    differentiable: bool
    layout: ArgumentLayout | None
    fast_call: FastCall
    _kernels: dict[str | None, Callable[..., Any]]

    @classmethod
    def _create(
        cls,
        namespace: str,
        name: str,
        schema: str,
        fn: Callable[..., Any],
        tags: tuple[torch.Tag, ...],
        layout: ArgumentLayout | None,
        differentiable: bool,
    ) -> CustomOpDef:
        """Define the operator, and give its class the generated fast call, if there is one."""
        # One class per operator: Python looks up `__call__` on the class, and a generated one with the
        # operator's own parameters costs half as much as one that takes *args and **kwargs.
        own: Any = type(f"CustomOpDef_{name.replace('.', '_')}", (cls,), {"__module__": cls.__module__})
        op = own.__new__(own)
        op.differentiable = differentiable
        op.layout = layout
        op._kernels = {}
        op.__init__(namespace, name, schema, fn, tags)  # type: ignore[misc]
        op._prepare(fn)
        if layout is None and op.fast_call.function is not None:
            own.__call__ = op.fast_call.function  # type: ignore[method-assign,assignment]
        return op

    def _register_to_dispatcher(self, tags: Any) -> None:
        # torch creates the library in a file of its own, which the dispatcher's messages would name.
        _torch.replace_library(
            self, call_at(user_location(), torch.library.Library, self._namespace, "FRAGMENT")
        )
        super()._register_to_dispatcher(tags)

    def _prepare(self, fn: Callable[..., Any]) -> None:
        schema = self._opoverload._schema
        self._argument_types = {a.name: argument_type(a) for a in schema.arguments}
        self._positional_names = [a.name for a in schema.arguments if not a.kwarg_only]
        returns = self._schema.rsplit("->", 1)[1].strip()
        self._returns_one_tuple = returns.startswith("(") and len(schema.returns) == 1
        self._python_defaults: dict[str, Any] = {}
        signature = signature_of(fn)
        if self.layout is None and signature is not None:
            names = set(self._argument_types)
            self._python_defaults = {
                p.name: p.default
                for p in signature.parameters.values()
                if p.name in names and p.default is not p.empty
            }
        for argument in schema.arguments:
            # A handwritten schema may have defaults that the function lacks; those of these types read back
            # as Python values.
            if (
                argument.has_default_value()
                and argument.name not in self._python_defaults
                and isinstance(argument.default_value, (float, bool, str, type(None)))
            ):
                self._python_defaults[argument.name] = argument.default_value
        lists = any(is_tensorlist_like_type(a.type) for a in schema.arguments)
        if not self.differentiable or (lists and is_functional_schema(schema)):
            with _torch.suppress_override_warning():
                kernel = (
                    list_kernel(self._opoverload, self)
                    if self.differentiable
                    else non_differentiable_kernel(self._opoverload)
                )
                self._lib.impl(self._name, kernel, "Autograd", with_keyset=True, allow_override=True)
        self.fast_call = FastCall(self)
        _torch.set_source_of_fake(self._qualname, fn)

    # --- what it is --------------------------------------------------------------------------------
    @property
    def qualname(self) -> str:
        """``namespace::name``."""
        return self._qualname

    @property
    def schema(self) -> Any:
        """The dispatcher's schema."""
        return self._opoverload._schema

    @property
    def overload(self) -> Any:
        """The dispatcher's operator, ``torch.ops.namespace.name.default``."""
        return self._opoverload

    @property
    def has_disabled_kernels(self) -> bool:
        """Whether `set_kernel_enabled` has switched a kernel off."""
        return bool(self._disabled_kernel)

    def kernel_for(self, device_type: str) -> Callable[..., Any] | None:
        """Return the kernel that runs on a device type, or None."""
        return self._kernels.get(device_type, self._kernels.get(None))

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.qualname,)

    def __copy__(self) -> CustomOpDef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomOpDef:
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the operator. Raises whatever the kernel or the dispatcher raises."""
        if self.layout is not None:
            flat, keywords = self.layout.flatten_call(args, kwargs)
            return self._opoverload(*flat, **keywords)
        return self._opoverload(*args, **kwargs)

    def retire(self) -> None:
        """Make every later use raise `OpDestroyedError`: the dispatcher has dropped the operator, and calling
        its overload would crash the process."""
        qualname = self.qualname

        def refuse(self: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
            raise OpDestroyedError(
                f"{qualname} was destroyed or registered again; use the new operator, torch.ops."
                f"{qualname.replace('::', '.')}",
                op=qualname,
            )

        own = type(self)
        for name in ("__call__", "set_kernel_enabled", *(n for n in dir(own) if n.startswith("register_"))):
            setattr(own, name, refuse)
        own._opoverload = property(refuse)  # type: ignore[assignment]

    # --- registrations -----------------------------------------------------------------------------
    def register_kernel(self, device_types: DeviceTypes, fn: Callable[..., Any] | None = None, /) -> Any:
        """Register the kernel of one or more device types (None: all that have no kernel of their own).

        Raises:
            SignatureError: ``fn`` cannot be called with the operator's arguments.
            RegistrationError: ``device_types`` is something else.
            ValueError: the operator has no tensor argument and no ``device`` argument to choose a kernel by.
        """

        types = [None] if device_types is None else self._device_types(device_types)

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            kernel = self._adapt(fn, "kernel")
            checked = checked_kernel(self.qualname, self.schema, kernel)
            super(CustomOpDef, self).register_kernel(device_types, checked)
            if len(self.schema.returns) > 1:
                kernel = checked  # calls past the dispatcher check what a single one is themselves
            for device_type in types:
                self._kernels[device_type] = kernel
            self.fast_call.refresh()
            return fn

        return wrap if fn is None else wrap(fn)

    def register_fake(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """Register the fake kernel, which takes tensors without data and returns outputs without data.

        Raises:
            SignatureError: ``fn`` cannot be called with the operator's arguments.

        At run time, returning real tensors or the wrong number of outputs raises `FakeKernelError`.
        """
        kernel = self._adapt(fn, "fake kernel")
        super().register_fake(checked_fake_kernel(self.qualname, self.schema, kernel))
        _torch.set_source_of_fake(self.qualname, fn)
        return fn

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Register the backward formula ``backward(ctx, *grads)``, and what to save for it.

        ``setup_context(ctx, inputs, output)``, or with keyword-only arguments
        ``setup_context(ctx, inputs, keyword_only_inputs, output)``, runs after the kernel.

        Raises:
            RuntimeError: the operator is not functional.
            RegistrationError: the operator was declared ``differentiable=False``.
            SignatureError: a function has the wrong signature.
        """
        if not self.differentiable:
            raise RegistrationError(
                f"{self.qualname} was made with differentiable=False; drop that to register a backward formula",
                op=self.qualname,
            )
        before = self._backward_fn, self._setup_context_fn
        super().register_autograd(backward, setup_context=setup_context)
        try:
            check_backward(self.qualname, backward, self.schema)
            if setup_context is not None:
                check_setup_context(self.qualname, setup_context, self.schema)
        except BaseException:
            self._backward_fn, self._setup_context_fn = before
            raise
        if self.layout is not None:
            self._backward_fn = self.layout.adapt_backward(backward)
            if setup_context is not None:
                self._setup_context_fn = self.layout.adapt_setup_context(setup_context)
        elif setup_context is not None:
            self._setup_context_fn = self._restore_dtypes(setup_context)
        self.fast_call.refresh()

    def register_vmap(self, func: Callable[..., Any] | None = None) -> Any:
        """Register ``func(info, in_dims, *args)``, which returns ``(outputs, out_dims)``.

        Raises:
            SignatureError: it cannot be called that way.
        """

        def wrap(func: Callable[..., Any]) -> Callable[..., Any]:
            if self.layout is None:
                check_vmap(self.qualname, func, self.schema)
            super(CustomOpDef, self).register_vmap(self.layout.adapt_vmap(func) if self.layout else func)
            self.fast_call.refresh()
            return func

        return wrap if func is None else wrap(func)

    def register_torch_dispatch(
        self, torch_dispatch_class: Any, fn: Callable[..., Any] | None = None, /
    ) -> Callable[..., Any]:
        """Register ``fn(mode_or_class, func, types, args, kwargs)`` for a torch_dispatch mode or subclass.

        Raises:
            SignatureError: ``fn`` does not take these five arguments.
            RegistrationError: ``torch_dispatch_class`` is not a class.
        """
        check_dispatch_class(self.qualname, torch_dispatch_class)

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            check_torch_dispatch(self.qualname, fn)
            super(CustomOpDef, self).register_torch_dispatch(torch_dispatch_class, fn)
            return fn

        return wrap if fn is None else wrap(fn)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> Any:
        """Cast floating-point tensors to ``cast_inputs`` first under autocast on ``device_type``.

        Raises:
            ValueError: the device type is unknown or has no autocast.
            RegistrationError: ``cast_inputs`` is not a floating-point dtype.
        """
        check_cast(self.qualname, cast_inputs)
        kernel = super().register_autocast(device_type, cast_inputs)
        self.fast_call.refresh()
        return kernel

    def register_effect(self, effect: Any) -> None:
        """Declare the operator's side effects: ``EffectType.ORDERED``, or None for none.

        Raises:
            RegistrationError: ``effect`` is neither.
        """
        check_effect(self.qualname, effect)
        super().register_effect(effect)

    @contextmanager
    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> Iterator[None]:
        """Turn a device type's kernel off (or on again) in a ``with`` block; the default kernel then runs."""
        with super().set_kernel_enabled(device_type, enabled):
            self.fast_call.refresh()
            yield
        self.fast_call.refresh()

    def _device_types(self, given: Any) -> list[str]:
        names = device_list(self.qualname, given)
        for name in names:
            dispatch_key(self.qualname, name)
        return names

    # --- how functions are wrapped -----------------------------------------------------------------
    def _adapt(self, fn: Callable[..., Any], role: str) -> Callable[..., Any]:
        if self.layout is None:
            check_kernel(self.qualname, role, fn, self.schema)
            return fill_missing_defaults(fn, self.schema)
        check_kernel(self.qualname, role, fn, as_schema(self.layout.signature))
        return self.layout.adapt_kernel(fn)

    def _restore_dtypes(self, setup_context: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``setup_context`` to see default dtypes as dtypes: the dispatcher stores them as integers."""
        dtypes = {
            name: default
            for name, default in self._python_defaults.items()
            if isinstance(default, torch.dtype) and self._argument_types[name][0] == "ScalarType"
        }
        if not dtypes:
            return setup_context
        names = self._positional_names

        def restored(ctx: Any, inputs: Any, output: Any, **more: Any) -> Any:
            """Args: the context, one input per schema argument, the output; keyword-only inputs by name."""
            inputs = tuple(
                dtypes[n] if n in dtypes and type(i) is int else i for n, i in zip(names, inputs, strict=True)
            )
            if "keyword_only_inputs" in more:
                given = more["keyword_only_inputs"].items()
                more["keyword_only_inputs"] = {
                    k: dtypes[k] if k in dtypes and type(v) is int else v for k, v in given
                }
            return setup_context(ctx=ctx, inputs=inputs, output=output, **more)

        return restored


def _by_name(qualname: str) -> Registered:
    op = registry.find(qualname)
    if op is None:
        raise OpDestroyedError(f"{qualname} is not registered in this process", op=qualname)
    return op
