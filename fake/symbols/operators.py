"""The Python operators of ``torch.SymInt``: ``a + b`` without the detours of torch's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fake import _torch as _t

__all__ = ["Operators"]

_DUNDERS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "mod", "eq", "ne", "lt", "gt", "le", "ge")},
    "__floordiv__": "int_floordiv",
}
_REFLECTED = {
    **{f"__r{name}__": name for name in ("add", "sub", "mul", "mod")},
    "__rfloordiv__": "int_floordiv",
}

_NUMBERS = {int: torch.SymInt, bool: torch.SymBool, float: torch.SymFloat}


def _operator(method: str, original: Callable, classes: tuple[Any, ...], *, reflected: bool) -> Callable:
    """``a + b``: from what is remembered if it can be, else through the node, else as torch does it."""
    watched = _t.symbolic_arithmetic_is_watched
    symbolic, numbers, new = torch.SymInt, _NUMBERS, object.__new__

    def lean(self: Any, other: Any) -> Any:
        node = self.node
        left = getattr(node, "_canonical", None)
        if left is not None and not watched():
            right = other
            if other.__class__ is not int:
                right = getattr(other.node, "_canonical", None) if other.__class__ is symbolic else None
            state = getattr(node.shape_env, "_fake_lean", None)
            if state is not None and right is not None:
                result = state.results.get((method, right, left) if reflected else (method, left, right))
                if result is not None:
                    if result.constant is not None:
                        return result.constant
                    made = new(result.__class__)
                    made.__dict__ = result.__dict__
                    return numbers[result.pytype](made)
        return through_node(self, node, other)

    def through_node(self: Any, node: Any, other: Any) -> Any:
        if node.__class__ not in classes or node.constant is not None:
            return original(self, other)
        if other.__class__ is int:
            operand: Any = node.wrap_int(other)
        elif other.__class__ is symbolic and not reflected:
            operand = other.node
            if operand.__class__ not in classes:
                return original(self, other)
        else:
            return original(self, other)
        result = getattr(operand, method)(node) if reflected else getattr(node, method)(operand)
        return result.constant if result.constant is not None else numbers[result.pytype](result)

    lean.__name__ = original.__name__
    return lean


class Operators:
    """The one owner of the Python operators of ``torch.SymInt``: ``a + b`` without the detours of torch's own.

    They only do what torch's operators do, in fewer steps, so they may stay: the first adopted number keeps them until
    :meth:`uninstall`; acceleration holds them while it is on.

    Args:
        classes: the nodes that they serve; of others torch's own operators take care.
    """

    def __init__(self, classes: tuple[Any, ...]) -> None:
        self._classes = classes
        self._lock = threading.RLock()
        self._holders = 0
        self._kept = False
        self._saved: dict[str, tuple[Any, Any]] = {}

    def keep(self) -> None:
        """Put them in place for the rest of the process; does nothing if that was done."""
        if not self._kept:
            with self._lock:
                if not self._kept:
                    self._kept = True
                    self.acquire()

    def acquire(self) -> None:
        """Put them in place until as many calls of :meth:`release`."""
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            for reflected, table in ((False, _DUNDERS), (True, _REFLECTED)):
                for name, method in table.items():
                    original = vars(torch.SymInt)[name]
                    ours = _operator(method, original, self._classes, reflected=reflected)
                    self._saved[name] = (original, ours)
                    setattr(torch.SymInt, name, ours)

    def release(self) -> None:
        """Undo one :meth:`acquire`; an operator that someone else has replaced since is left alone."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for name, (original, ours) in self._saved.items():
                if vars(torch.SymInt).get(name) is ours:
                    setattr(torch.SymInt, name, original)
            self._saved.clear()

    def uninstall(self) -> None:
        """Undo :meth:`keep`: numbers stay lean, their Python operators are torch's again."""
        with self._lock:
            if self._kept:
                self._kept = False
                self.release()
