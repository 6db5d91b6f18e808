"""Python operators of ``torch.SymInt``: ``a + b`` without the overhead of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from fake.seam.patches import Patch, When
from fake.seam.proxy_tensor import arithmetic_watchers

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
    """Compute ``a + b`` from memory if possible, else through the node, else as torch does."""
    get_mode, proxies, modes_before, logs = arithmetic_watchers
    symbolic, numbers = torch.SymInt, _NUMBERS
    new: Callable[..., Any] = object.__new__
    recall = attrgetter(f"_canonical._{method}_{'reflected' if reflected else 'results'}")

    def lean(self: Any, other: Any) -> Any:
        node = self.node
        try:
            # Other numbers have no node, or none that is memoized; True would be found as 1.
            result = recall(node)[other if other.__class__ is int else other.node._canonical]
        except (AttributeError, KeyError):
            return through_node(self, node, other)
        if get_mode(proxies) is not None or modes_before[0] is not None or logs.GET_DTRACE_STRUCTURED:
            return through_node(self, node, other)
        own = result.__dict__
        if own["constant"] is not None:
            return own["constant"]
        made = new(result.__class__)
        made.__dict__ = own
        number: Any = new(numbers[own["pytype"]])
        number.node = made
        return number

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
    """Return patches of ``torch.SymInt``'s Python operators for nodes of some classes;
    others use torch's operators."""

    def patch(name: str, method: str, reflected: bool) -> Patch:
        """Return the patch of an operator. Args: its name, the node's method to call,
        and whether operands are swapped."""

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
