"""Private torch names for registering a backend before anything is compiled. Does not import Inductor."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from fake.seam.dynamo import registry as backend_registry
from fake.seam.patches import Patch, When, always


def forget_cudagraphs() -> None:
    """Free the memory that recorded CUDA graphs hold, if there are any."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


_original_register_backend = types.FunctionType(
    backend_registry.register_backend.__code__, vars(backend_registry), "register_backend", (None, None, ())
)
_repeatable: dict[str, Callable[..., Any]] = {}
_registration = threading.Lock()


def _register_backend(compiler_fn=None, name=None, tags=()):  # type: ignore[no-untyped-def]
    from fxpasses.dynamo._torch_registry import registered_backend

    return registered_backend(compiler_fn, name, tags)


def registered_backend(compiler_fn: Any, name: str | None, tags: Sequence[str]) -> Any:
    """``torch._dynamo.register_backend`` that ignores a repeated registration if it is allowed."""
    if _repeatable.get(name or "") is not compiler_fn or compiler_fn is None:
        return _original_register_backend(compiler_fn, name, tags)
    with _registration:
        if backend_registry._COMPILER_FNS.get(str(name)) is compiler_fn:
            return compiler_fn
        return _original_register_backend(compiler_fn, name, tags)


def repeatable_registration(name: str, backend: Callable[..., Any]) -> tuple[Patch, ...]:
    """The ledger's patch that lets several threads that first use a backend at the same time register it.

    ``torch.compile`` loads a backend by its entry point and then registers it. No lock spans the check
    whether it is registered and the registration, which takes a repeated one for another backend of the same
    name. The threads hold the registering function before they load the backend, so the patch replaces the
    function's code.

    Args:
        name: the name that the backend is registered under.
        backend: the backend.
    """
    _repeatable[name] = backend
    known, found = (
        list(inspect.signature(f).parameters) for f in (_register_backend, _original_register_backend)
    )
    problem = "" if found == known else "torch registers backends in another way than is known"
    return (
        Patch(
            backend_registry.register_backend,
            "__code__",
            always(_register_backend.__code__),
            when=When.BACKEND,
            versions=None,
            unfit=lambda: problem,
            lost="threads that use the backend for the first time at once may be told that its name is a duplicate",
        ),
    )
