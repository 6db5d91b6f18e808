"""Which operator has which checks, and what a check is made of.

A check takes the call's arguments by name, defaults filled in. It raises what eager raises, or returns. Sizes may be
symbolic, and then every comparison of them leaves a guard: a check asks first what is known anyway (dtypes, ranks, numbers),
compares only what eager compares, and calls neither ``int()`` nor ``range()`` on a size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fake.seam.dispatch import OpOverload, no_dispatch

Check = Callable[[OpOverload, dict[str, Any]], None]

_CHECKS: dict[str, list[Check]] = {}


def check_for(*names: str) -> Callable[[Check], Check]:
    """Register a check for all overloads of operators, in place and with ``out=`` too."""

    def register(check: Check) -> Check:
        for name in names:
            _CHECKS.setdefault(name, []).append(check)
        return check

    return register


def checks_of(func: OpOverload) -> tuple[Check, ...]:
    """The checks of an operator."""
    if func.namespace != "aten":
        return ()
    name = func._schema.name.split("::")[1]
    return tuple(dict.fromkeys((*_CHECKS.get(name, ()), *_CHECKS.get(name.rstrip("_"), ()))))


def bind(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name, defaults included.

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
    """Run an operator's checks.

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
    """Whether an operator has any."""
    return bool(_checks_of(func))


def refuse(condition: bool, func: OpOverload, problem: str, error: type[Exception] = RuntimeError) -> None:
    """Raise eager's error if ``condition`` holds.

    Args:
        condition: whether the call is refused.
        func: the overload that is called; the message begins with it.
        problem: what is wrong, with the argument's name.
        error: the class that eager raises.
    """
    if condition:
        raise error(f"{func}: {problem}")


@functools.cache
def refused_with(call: Callable[[], Any]) -> type[Exception]:
    """The class of error with which eager refuses a call on small tensors of its own: it differs between releases of torch."""
    with no_dispatch():
        try:
            call()
        except (RuntimeError, TypeError) as error:
            return type(error)
    raise AssertionError("eager takes a call that it is known to refuse")


@functools.cache
def is_refused(call: Callable[[], Any]) -> bool:
    """Whether eager refuses a call on small tensors of its own: some releases of torch do."""
    with no_dispatch():
        try:
            call()
        except RuntimeError:
            return True
    return False


def wrapped_dim(func: OpOverload, dim: int, rank: int) -> int:
    """A dimension counted from the front.

    Args:
        func: the overload that is called.
        dim: the dimension as it was given, negative ones counted from the end.
        rank: the number of dimensions; a scalar has dimension 0.

    Raises:
        IndexError: there is no such dimension.
    """
    limit = max(rank, 1)
    refuse(
        not -limit <= dim < limit, func,
        f"Dimension out of range (expected dim to be in range of [{-limit}, {limit - 1}], but got {dim})", IndexError,
    )  # fmt: skip
    return dim % limit


def extent(sizes: Any, strides: Any, offset: int) -> int:
    """How many elements a storage must have for a tensor.

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
