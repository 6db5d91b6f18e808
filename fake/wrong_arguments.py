"""Argument type checks: one error that names the call, the argument, its value and what is expected,
before anything happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fake.error_text import short_repr


class ArgumentTypeError(TypeError):
    """A function received an argument of a type that it cannot use.

    Attributes:
        call: the function.
        argument: the parameter.
        value: the value passed.
        expected: what the parameter accepts.
    """

    def __init__(self, call: str, argument: str, value: Any, expected: str) -> None:
        super().__init__(
            f"{call}: {argument} is {short_repr(value)} ({type(value).__name__}); pass {expected}"
        )
        self.call = call
        self.argument = argument
        self.value = value
        self.expected = expected


def check_type(
    call: str,
    argument: str,
    value: Any,
    kinds: type | tuple[type, ...] | Callable[[Any], bool],
    expected: str,
) -> None:
    """Raise unless a value is of one of the given types, or satisfies a predicate (such as ``callable``).

    Args:
        call: the function that was called.
        argument: its parameter.
        value: the value passed for it.
        kinds: the accepted types, or a predicate that is true of accepted values.
        expected: what to pass instead, in words.

    Raises:
        ArgumentTypeError: the value is not accepted.

    >>> check_type("annotated_code", "gm", 3, (str,), "a graph")
    Traceback (most recent call last):
    fake.wrong_arguments.ArgumentTypeError: annotated_code: gm is 3 (int); pass a graph
    """
    right = isinstance(value, kinds) if isinstance(kinds, (type, tuple)) else kinds(value)
    if not right:
        raise ArgumentTypeError(call, argument, value, expected)


def is_path(value: Any) -> bool:
    """Return whether a value can be a file path: an empty one would be the current directory, and no file
    system allows a null character."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value) != "" and "\0" not in os.fsdecode(value)


def are_words(value: Any, kinds: Any = Sequence) -> bool:
    """Return whether a value is a sequence (or one of ``kinds``) of strings, and not a string itself."""
    return (
        isinstance(value, kinds)
        and not isinstance(value, str)
        and all(isinstance(word, str) for word in value)
    )


def check_flags(call: str, **flags: Any) -> None:
    """Raise `ArgumentTypeError` unless each value is True or False: ``"no"`` would be truthy."""
    for argument, value in flags.items():
        check_type(call, argument, value, bool, "True or False")


def check_dynamic(call: str, dynamic: Any, **flags: Any) -> None:
    """Raise `ArgumentTypeError` unless ``torch.compile`` accepts ``dynamic`` and each flag is a bool."""
    check_flags(call, **flags)
    check_type(call, "dynamic", dynamic, (bool, type(None)), "True, False or None")
