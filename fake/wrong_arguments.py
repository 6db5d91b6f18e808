"""Arguments of the wrong type: one error that names the call, the argument, what it got and what it takes, before anything happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fake.error_text import short_repr


class ArgumentTypeError(TypeError):
    """A function was given an argument of a type that it cannot use.

    Attributes:
        call: the function.
        argument: the parameter.
        value: what it was given.
        expected: what it takes.
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
    """Raise unless a value is of one of some types, or does what a question asks for (``callable``).

    Args:
        call: the function that was called.
        argument: its parameter.
        value: what was given for it.
        kinds: the types that it takes, or a question that its values answer with yes.
        expected: what to pass instead, in words.

    Raises:
        ArgumentTypeError: it is none of them.

    >>> check_type("annotated_code", "gm", 3, (str,), "a graph")
    Traceback (most recent call last):
    fake.wrong_arguments.ArgumentTypeError: annotated_code: gm is 3 (int); pass a graph
    """
    right = isinstance(value, kinds) if isinstance(kinds, (type, tuple)) else kinds(value)
    if not right:
        raise ArgumentTypeError(call, argument, value, expected)


def is_path(value: Any) -> bool:
    """Whether a value may be the path of a file: an empty one would be the current directory, and no file system takes a null character."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value) != "" and "\0" not in os.fsdecode(value)


def are_words(value: Any, kinds: Any = Sequence) -> bool:
    """Whether a value is a sequence (or one of ``kinds``) of text, and not text itself."""
    return (
        isinstance(value, kinds)
        and not isinstance(value, str)
        and all(isinstance(word, str) for word in value)
    )


def check_flags(call: str, **flags: Any) -> None:
    """Raise `ArgumentTypeError` unless each value is True or False: ``"no"`` would count as yes."""
    for argument, value in flags.items():
        check_type(call, argument, value, bool, "True or False")


def check_dynamic(call: str, dynamic: Any, **flags: Any) -> None:
    """Raise `ArgumentTypeError` unless it is what ``torch.compile`` takes for ``dynamic``, and the others are True or False."""
    check_flags(call, **flags)
    check_type(call, "dynamic", dynamic, (bool, type(None)), "True, False or None")
