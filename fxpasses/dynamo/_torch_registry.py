"""Private torch names of the registration of a backend, before anything is compiled: Inductor is not imported for it."""

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


_registered_once = types.FunctionType(
    backend_registry.register_backend.__code__, vars(backend_registry), "register_backend", (None, None, ())
)
_repeatable: dict[str, Callable[..., Any]] = {}
_registration = threading.Lock()


def _register_backend(compiler_fn=None, name=None, tags=()):  # type: ignore[no-untyped-def]
    from fxpasses.dynamo._torch_registry import registered_backend

    return registered_backend(compiler_fn, name, tags)


def registered_backend(compiler_fn: Any, name: str | None, tags: Sequence[str]) -> Any:
    """``torch._dynamo.register_backend``, to which a repeated registration is none where it is allowed."""
    if _repeatable.get(name or "") is not compiler_fn or compiler_fn is None:
        return _registered_once(compiler_fn, name, tags)
    with _registration:
        if backend_registry._COMPILER_FNS.get(str(name)) is compiler_fn:
            return compiler_fn
        return _registered_once(compiler_fn, name, tags)


def repeatable_registration(name: str, backend: Callable[..., Any]) -> tuple[Patch, ...]:
    """The entry of the ledger that lets threads which use a backend for the first time at once all register it.

    ``torch.compile`` loads a backend by its entry point and registers it then, without a lock between the question whether
    it is registered and the registration, which takes a repeated one for another backend of the same name. The threads hold
    the function that registers before they load the backend: it is the function's code that is replaced.

    Args:
        name: under which it is registered.
        backend: what is registered.
    """
    _repeatable[name] = backend
    known, found = (list(inspect.signature(f).parameters) for f in (_register_backend, _registered_once))
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
