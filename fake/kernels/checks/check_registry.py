"""The registry of argument checks.

A check takes the arguments of a call by name, with defaults filled in. It raises what eager raises, or
returns. Sizes may be symbolic, and then each comparison of them adds a guard. So a check first tests what
needs no guard (dtypes, ranks, numbers), compares only what eager compares, and never calls ``int()`` or
``range()`` on a size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fake.seam.dispatch import OpOverload, no_dispatch

Check = Callable[[OpOverload, dict[str, Any]], None]

_CHECKS: dict[str, list[Check]] = {}


def check_for(*names: str) -> Callable[[Check], Check]:
    """Register a check for all overloads of the named operators, including in-place and ``out=`` variants."""

    def register(check: Check) -> Check:
        for name in names:
            _CHECKS.setdefault(name, []).append(check)
        return check

    return register


def checks_of(func: OpOverload) -> tuple[Check, ...]:
    """Return the checks of an operator."""
    if func.namespace != "aten":
        return ()
    name = func._schema.name.split("::")[1]
    return tuple(dict.fromkeys((*_CHECKS.get(name, ()), *_CHECKS.get(name.rstrip("_"), ()))))


def bind(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults.

    Args:
        func: the overload that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    >>> import torch
    >>> bind(torch.ops.aten.narrow.default, ("x", 0), {"start": 1, "length": 2})
    {'self': 'x', 'dim': 0, 'start': 1, 'length': 2}
    """
    bound = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            bound[argument.name] = args[index]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def check_arguments(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Run the checks of an operator.

    Args:
        func: the overload that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        Exception: eager's error for such arguments, of eager's class.
    """
    checks = _checks_of(func)
    if checks:
        bound = bind(func, args, kwargs)
        for check in checks:
            check(func, bound)


_checks_of = functools.cache(checks_of)


def has_checks(func: OpOverload) -> bool:
    """Return whether an operator has checks."""
    return bool(_checks_of(func))


def refuse(condition: bool, func: OpOverload, problem: str, error: type[Exception] = RuntimeError) -> None:
    """Raise ``error`` if ``condition`` holds.

    Args:
        condition: whether to refuse the call.
        func: the overload that is called; the message begins with it.
        problem: what is wrong, with the argument's name.
        error: the class that eager raises.
    """
    if condition:
        raise error(f"{func}: {problem}")


@functools.cache
def eager_error_class(call: Callable[[], Any]) -> type[Exception]:
    """Return the error class with which eager refuses ``call``; it differs between releases of torch."""
    with no_dispatch():
        try:
            call()
        except (RuntimeError, TypeError) as error:
            return type(error)
    raise AssertionError("eager takes a call that it is known to refuse")


@functools.cache
def is_refused(call: Callable[[], Any]) -> bool:
    """Return whether eager refuses ``call``, a call on small tensors; only some releases of torch do."""
    with no_dispatch():
        try:
            call()
        except RuntimeError:
            return True
    return False


def wrapped_dim(func: OpOverload, dim: int, rank: int) -> int:
    """Return a dimension counted from the front.

    Args:
        func: the overload that is called.
        dim: the dimension as given; negative ones count from the end.
        rank: the number of dimensions; a scalar has dimension 0.

    Raises:
        IndexError: the dimension is out of range.
    """
    limit = max(rank, 1)
    refuse(
        not -limit <= dim < limit, func,
        f"Dimension out of range (expected dim to be in range of [{-limit}, {limit - 1}], but got {dim})", IndexError,
    )  # fmt: skip
    return dim % limit


def extent(sizes: Any, strides: Any, offset: int) -> int:
    """Return how many elements a storage must have to hold a tensor.

    Args:
        sizes: its shape.
        strides: its strides, in elements.
        offset: its storage offset, in elements.

    >>> extent((2, 3), (3, 1), 4)
    10
    """
    if 0 in sizes:
        return 0
    return offset + 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
