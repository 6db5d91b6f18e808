"""`Library`, `define` and `impl`: operators by schema string and dispatch key.

`Library` is ``torch.library.Library`` with two differences. A library that defines an operator stays alive
until it is destroyed; torch drops the operator with the last Python reference to the library, so operators
registered in a helper function vanish. And kernels are checked against the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fake.library.argument_checks import device_list, dispatch_key as dispatch_key_of
from fake.library.errors import DuplicateOpError, ReservedNamespaceError, SchemaError, UnknownOpError
from fake.library.location import call_at, user_location
from fake.library.registrations import registry
from fake.library.schema import check_nameless
from fake.library.signatures import check_kernel, check_torch_dispatch
from fake.seam import library as _torch

fallthrough_kernel = _torch.fallthrough_kernel

#: Kernels for these keys see the operator's own arguments, so their signature can be checked.
_CHECKED_KEYS = (
    "CPU",
    "CUDA",
    "XPU",
    "MPS",
    "Meta",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)


class Library(torch.library.Library):
    """A set of definitions and kernels in one namespace; see ``torch.library.Library``.

    Args:
        ns: the namespace.
        kind: ``"DEF"`` (owns the namespace), ``"FRAGMENT"`` (adds to it) or ``"IMPL"`` (kernels only).
        dispatch_key: the key of kernels registered without one.

    Raises:
        ValueError: the kind is unknown, the namespace is reserved
            (`ReservedNamespaceError`) or no string (`SchemaError`).

    >>> lib = Library("doc_library", "DEF")
    >>> lib.define("double(Tensor x) -> Tensor")
    'double'
    >>> lib.impl("double", lambda x: x * 2, "CPU")
    >>> torch.ops.doc_library.double(torch.ones(2))
    tensor([2., 2.])
    >>> lib._destroy()
    """

    def __init__(self, ns: str, kind: str, dispatch_key: str = "") -> None:
        if not isinstance(ns, str):
            raise SchemaError(f"Library: ns is {ns!r}; pass the name of a namespace, such as 'mylib'")
        if ns == "prim" and kind in ("DEF", "FRAGMENT"):
            raise ReservedNamespaceError(ns)
        call_at(user_location(), super().__init__, ns, kind, dispatch_key)

    def define(self, schema: str, alias_analysis: str = "", *, tags: Any = ()) -> str:
        """Define an operator and return its name.

        Args:
            schema: the schema with the operator's name, ``"name(Tensor x) -> Tensor"``.
            alias_analysis: ``"CONSERVATIVE"`` for an operator whose schema does not describe its aliasing.
            tags: tags of the operator.

        Raises:
            DuplicateOpError: the operator is already defined.
            SchemaError: ``schema`` is not a string.
            RuntimeError: the schema cannot be parsed, or ``alias_analysis`` is unknown.
        """
        if not isinstance(schema, str):
            raise SchemaError(
                f"define: schema is {schema!r}; pass a text, such as 'name(Tensor x) -> Tensor'"
            )
        try:
            name = super().define(schema, alias_analysis, tags=tags)
        except RuntimeError as error:
            if "multiple times" in str(error):
                qualname = f"{self.ns}::{schema.split('(')[0]}"
                raise DuplicateOpError(f"{qualname} is defined already: {error}", op=qualname) from error
            raise
        registry.hold(self)
        return name

    def impl(
        self,
        op_name: Any,
        fn: Callable[..., Any],
        dispatch_key: str = "",
        *,
        with_keyset: bool = False,
        **options: Any,
    ) -> None:
        """Register a kernel for a dispatch key.

        Args:
            op_name: the operator's name, or its overload.
            fn: the kernel.
            dispatch_key: the dispatch key; defaults to the library's.
            with_keyset: whether the kernel takes the dispatch keyset as its first argument.
            options: as for ``torch.library.Library.impl``.

        Raises:
            TypeError: ``fn`` is not callable.
            SignatureError: it cannot be called with the operator's arguments (checked
                for backend and composite keys).
            RuntimeError: ``allow_override=False``, and there already is a kernel.
        """
        key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
        if callable(fn) and fn is not fallthrough_kernel and key in _CHECKED_KEYS and not with_keyset:
            self._check(op_name, fn)
        super().impl(op_name, fn, dispatch_key, with_keyset=with_keyset, **options)

    def _check(self, op_name: Any, fn: Callable[..., Any]) -> None:
        name = op_name._name if isinstance(op_name, _torch.OpOverload) else op_name
        if not isinstance(name, str):
            return
        qualname = name if "::" in name else f"{self.ns}::{name}"
        schema = _torch.find_schema(qualname)
        if schema is not None:
            check_kernel(qualname, "kernel", fn, schema, exact=False)

    def _register_fake(
        self, op_name: str, fn: Callable[..., Any], _stacklevel: int = 1, **options: Any
    ) -> None:
        schema = _torch.find_schema(f"{self.ns}::{op_name}")
        if schema is not None:
            check_kernel(f"{self.ns}::{op_name}", "fake kernel", fn, schema, exact=False)
        call_at(user_location(_stacklevel), super()._register_fake, op_name, fn, **options)

    def _register_torch_dispatch_rule(
        self, op_name: str, torch_dispatch_class: Any, fn: Callable[..., Any]
    ) -> None:
        check_torch_dispatch(f"{self.ns}::{op_name}", fn)
        super()._register_torch_dispatch_rule(op_name, torch_dispatch_class, fn)

    def _destroy(self) -> None:
        super()._destroy()
        registry.release(self)


@contextmanager
def scoped_library(*args: Any, **kwargs: Any) -> Iterator[Library]:
    """Yield a `Library` that is destroyed at the end of the ``with`` block."""
    lib = Library(*args, **kwargs)
    try:
        yield lib
    finally:
        lib._destroy()


def library_for(namespace: str, lib: torch.library.Library | None) -> torch.library.Library:
    """Return ``lib``, or a new fragment of ``namespace`` that lives until the registry is reset."""
    if lib is not None:
        return lib
    fragment = Library(namespace, "FRAGMENT")
    registry.hold(fragment)
    return fragment


def define(
    qualname: str | torch.library.Library,
    schema: str,
    alias_analysis: str = "",
    *,
    lib: torch.library.Library | None = None,
    tags: Any = (),
) -> Any:
    """Define the operator ``qualname`` (``"ns::name"``) by a schema without a name,
    ``"(Tensor x) -> Tensor"``.

    ``define(library, "name(Tensor x) -> Tensor")`` is the older form, a decorator for the kernel.

    Args:
        qualname: the operator's name, or a library.
        schema: arguments and returns.
        alias_analysis: see `Library.define`; used only by the older form.
        lib: the definition lives as long as this library; without it, until the registry is reset.
        tags: tags of the operator.

    Returns:
        None, or the decorator of the older form.

    Raises:
        UnknownOpError: ``qualname`` is not a string of that form.
        SchemaError: ``schema`` does not look like a schema without a name.
        DuplicateOpError: the operator already exists.
    """
    if isinstance(qualname, torch.library.Library):
        library = qualname

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            library.impl(library.define(schema, alias_analysis), fn)
            return fn

        return wrap
    namespace, name = _split(qualname, "define")
    check_nameless(schema, "define(qualname, schema, ...)", qualname)
    library_for(namespace, lib).define(name + schema, tags=tags)
    return None


def _split(qualname: Any, function: str) -> tuple[str, str]:
    if not isinstance(qualname, str):
        raise UnknownOpError(f"{function}(qualname, ...): expected a string, got {type(qualname).__name__}")
    parts = qualname.split("::")
    if len(parts) != 2:
        raise UnknownOpError(
            f"{function}: expected {qualname!r} to be of the form 'namespace::name': operators need a namespace",
            op=qualname,
        )
    return parts[0], parts[1]


def impl(
    qualname: str | torch.library.Library,
    types: str | Sequence[str],
    func: Any = None,
    *,
    lib: torch.library.Library | None = None,
    dispatch_key: str = "",
) -> Any:
    """Register a kernel of an existing operator; without ``func``, return a decorator.

    Args:
        qualname: ``"ns::name"``. A `Library` selects the older form ``impl(library, name, dispatch_key)``.
        types: device types, dispatch keys, or ``"default"`` for all devices.
        func: the kernel.
        lib: the registration lives as long as this library; without it, until the process ends.

    Raises:
        UnknownOpError: ``qualname`` is not of that form.
        SignatureError: the kernel cannot be called with the operator's arguments.
        RegistrationError: a device type is unknown (a ``RuntimeError``).
    """
    if isinstance(qualname, torch.library.Library):
        library, name, key = qualname, types, func or dispatch_key

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            library.impl(name, fn, key)
            return fn

        return wrap
    keys = dict.fromkeys(dispatch_key_of(str(qualname), name) for name in device_list(str(qualname), types))
    namespace, _ = _split(qualname, "impl")

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        library = library_for(namespace, lib)
        for key in keys:
            library.impl(qualname, fn, key)
        return fn

    return register if func is None else register(func)
