"""The Python operators of ``torch.SymInt``: ``a + b`` without the detours of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake import _torch as _t
from fake.seam.patches import Patch, When

__all__ = ["patches"]

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


def patches(classes: tuple[Any, ...]) -> tuple[Patch, ...]:
    """The Python operators of ``torch.SymInt``, for the nodes of some classes; of others torch's own operators take care."""

    def patch(name: str, method: str, reflected: bool) -> Patch:
        def make(original: Callable) -> Callable:
            return _operator(method, original, classes, reflected=reflected)

        return Patch(
            torch.SymInt,
            name,
            make,
            when=When.MODE_OR_COMPILATION,
            lost="time: each sum or comparison of symbolic integers takes torch's detours",
        )

    return (
        *(patch(name, method, False) for name, method in _DUNDERS.items()),
        *(patch(name, method, True) for name, method in _REFLECTED.items()),
    )
