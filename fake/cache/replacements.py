"""Track kernels that this process replaces through ``torch.library``,
and invalidate the caches that depend on them.

``register_fake`` on an ATen operator, or ``Library.impl`` of its ``Meta`` kernel, changes the operator's
answer, and the answers of all operators that decompose into it. Covering that in keys would slow down every
hit, so a registration empties the caches instead. It is noticed by wrapping ``torch.library.Library.impl``
and ``_destroy``, from the first answer that a cache may keep.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fake.kernels.rule_registry import when_rules_change
from fake.seam.dispatch import OpOverload, has_builtin_fake_kernels, has_kernel, registered_fake_kernel
from fake.seam.patches import LEDGER, Patch, When

_BUILTIN = frozenset(("aten", "prim", "prims"))


def _libraries() -> Iterator[Any]:
    """Yield the live libraries; each has a finalizer, of which Python keeps a list."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and issubclass(type(alive[0]), torch.library.Library):
            yield alive[0]


class Cache(Protocol):
    """A cache that drops its answers when a kernel is replaced."""

    def invalidate(self) -> None: ...


class Replacements:
    """The replaced kernels, as observed by the wrapped methods of ``torch.library.Library``.

    Attributes:
        generation: increases with every kernel that is registered or withdrawn, of any operator.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._replaced_before_import = has_builtin_fake_kernels()
        self._known_at_import = weakref.WeakKeyDictionary(
            {library: set(library._op_impls) for library in _libraries() if library.ns == "aten"}
        )
        self._is_watching = False
        self._lock = threading.RLock()
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[torch.library.Library, set[str]] = weakref.WeakKeyDictionary()
        self._finalizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def subscribe(self, cache: Cache) -> None:
        """Call ``cache.invalidate()`` whenever a kernel of a builtin operator is
        replaced (keeps no reference)."""
        with self._lock:
            self._caches.add(cache)

    @property
    def any_builtin(self) -> bool:
        """Whether a kernel of one of torch's own operators is currently replaced."""
        with self._lock:
            return self._replaced_before_import or any(library.ns in _BUILTIN for library in self._names)

    def includes(self, func: Any) -> bool:
        """Return whether an operator uses a kernel that was registered over torch's."""
        if registered_fake_kernel(func) is not None:
            return True
        with self._lock:
            return any(func.name() in names for names in self._names.values())

    def watch(self) -> None:
        """Start watching, from the first answer that a cache may keep; no-op if already watching."""
        if self._is_watching:
            return
        with self._lock:
            if not self._is_watching:
                LEDGER.keep(*PATCHES)
                self._add_earlier_replacements()
                self._is_watching = True

    def _add_earlier_replacements(self) -> None:
        """Note kernels of torch's own operators registered between the import of this module and now."""
        for library in _libraries():
            if library.ns == "aten":
                for registered in library._op_impls - self._known_at_import.get(library, set()):
                    namespace, name, key = registered.split("/")
                    if self._affects_fake_results(namespace, name, key):
                        self._add_replacement(library, name)

    def _watched_impl(self, impl: Any) -> Any:
        @functools.wraps(impl)
        def watched_impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
            """Call ``torch.library.Library.impl`` and note it. Args: the library, and those of the method."""
            key = dispatch_key or library.dispatch_key or "CompositeImplicitAutograd"
            name = op_name._name if isinstance(op_name, OpOverload) else op_name
            replaces = isinstance(name, str) and self._affects_fake_results(library.ns, name, key)
            impl(library, op_name, fn, dispatch_key, **options)
            if replaces:
                self._add_replacement(library, name.split("::")[-1])
                self._invalidate_caches(library.ns)

        return watched_impl

    def _watched_destroy(self, destroy: Any) -> Any:
        @functools.wraps(destroy)
        def watched_destroy(library: Any) -> None:
            destroy(library)
            self._on_library_destroyed(library)

        return watched_destroy

    def on_rule_registered(self) -> None:
        """Note that a rule of ``fake.kernels`` was registered on top of this package's."""
        self._invalidate_caches("aten")

    @staticmethod
    def _affects_fake_results(namespace: str, name: str, key: str) -> bool:
        """Return whether a kernel changes what fake tensors report. torch defines prims, and operators of
        jagged tensors, lazily: their first kernel changes nothing."""
        if key != "Meta" and not key.startswith("Composite"):
            return False
        if namespace == "aten" and name.removeprefix("aten::").startswith("_nested_"):
            return False
        if namespace not in ("prim", "prims"):
            return True
        return has_kernel(f"{namespace}::{name.split('::')[-1]}", key)

    def _add_replacement(self, library: Any, name: str) -> None:
        with self._lock:
            if library not in self._names:
                self._names[library] = set()
                self._finalizers[library] = weakref.finalize(library, self._invalidate_caches, library.ns)
                self._finalizers[library].atexit = False
            # In the dispatcher's names, a default overload has no suffix.
            self._names[library].add(f"{library.ns}::{name.removesuffix('.default')}")

    def _on_library_destroyed(self, library: Any) -> None:
        with self._lock:
            names = self._names.pop(library, None)
            if names:
                self._finalizers.pop(library).detach()
        if names:
            self._invalidate_caches(library.ns)

    def _invalidate_caches(self, namespace: str) -> None:
        with self._lock:
            self.generation += 1
            caches = list(self._caches) if namespace in _BUILTIN else []
        # Without the lock: garbage collection may call this in a thread that holds a cache's lock.
        for cache in caches:
            cache.invalidate()


REPLACEMENTS = Replacements()
"""Process-wide, like ``torch.library``."""

PATCHES = LEDGER.add(
    *(
        Patch(
            torch.library.Library,
            name,
            make,
            when=When.ANSWERS,
            versions=None,
            lost="caches go on to give the answers of kernels that were replaced meanwhile",
        )
        for name, make in (("impl", REPLACEMENTS._watched_impl), ("_destroy", REPLACEMENTS._watched_destroy))
    )
)
when_rules_change(REPLACEMENTS.on_rule_registered)
