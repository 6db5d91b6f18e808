"""The process's registrations: one owner, one lock, one reset.

An operator stays alive as long as something can call it. ``torch.ops`` can reach every operator by name, so
the registry holds each operator made here, and each `Library` that defines one, until it is destroyed. (torch
keeps only weak references: there an operator defined in a helper function disappears when the helper
returns.)
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from fake.seam import library as _torch


class Registered(Protocol):
    """An operator as the registry sees it."""

    @property
    def qualname(self) -> str: ...

    def retire(self) -> None: ...


class Registry:
    """Holds the live operators and libraries. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ops: dict[str, Registered] = {}
        self._libraries: dict[int, torch.library.Library] = {}

    def add_op(self, op: Registered) -> None:
        """Hold ``op`` until it is destroyed or replaced."""
        with self._lock:
            self._ops[op.qualname] = op

    def find(self, qualname: str) -> Registered | None:
        """Return the operator made here under that name, or None."""
        with self._lock:
            return self._ops.get(qualname)

    def names(self) -> list[str]:
        """Return the qualified names of all operators made here, sorted."""
        with self._lock:
            return sorted(self._ops)

    def hold(self, library: torch.library.Library) -> None:
        """Keep ``library`` alive until `release`."""
        with self._lock:
            self._libraries[id(library)] = library

    def release(self, library: torch.library.Library) -> None:
        """Forget ``library``."""
        with self._lock:
            self._libraries.pop(id(library), None)

    def destroy(self, qualname: str) -> bool:
        """Remove an operator from the dispatcher; its object raises when called.

        Returns whether there was one.
        """
        with self._lock:
            op = self._ops.pop(qualname, None)
            library = _torch.take_library(qualname)
            if library is not None:
                library._destroy()
            _torch.OPDEFS.pop(qualname, None)
            if op is not None:
                op.retire()
            return op is not None or library is not None

    def reset(self) -> None:
        """Destroy every operator and library made here."""
        with self._lock:
            for name in list(self._ops):
                self.destroy(name)
            for library in list(self._libraries.values()):
                library._destroy()
            self._libraries.clear()


registry = Registry()
