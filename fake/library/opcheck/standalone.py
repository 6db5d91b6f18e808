"""torch's checks as functions of their own, for tests that call them directly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fake.library import _torch

__all__ = ["aot_autograd_check", "assert_raises_regex", "autograd_registration_check", "fake_check"]


def aot_autograd_check(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: bool,
    *,
    check_gradients: bool | str = "auto",
    **options: Any,
) -> None:
    """Compare a function under AOTAutograd with eager: outputs, and gradients if asked for or (``"auto"``) possible.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        dynamic: whether sizes are symbolic.
        check_gradients: whether gradients are compared.
        options: further ones of torch's check.

    Raises:
        AssertionError: they differ.
    """
    check = _torch.optests().aot_autograd_check
    check(func, tuple(args), dict(kwargs), dynamic, check_gradients=check_gradients, **options)


def autograd_registration_check(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise AssertionError if the operator's autograd is not behind an Autograd key.

    Args:
        op: the overload.
        args: positional arguments of a sample.
        kwargs: keyword arguments of a sample.
    """
    _torch.optests().autograd_registration_check(op, tuple(args), dict(kwargs))


def fake_check(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if the fake kernel disagrees with the real one.

    Args:
        op: the overload.
        args: positional arguments of a sample.
        kwargs: keyword arguments of a sample.
    """
    _torch.optests().fake_check(op, tuple(args), dict(kwargs))


@contextmanager
def assert_raises_regex(exception: type[BaseException], pattern: str) -> Iterator[None]:
    """Assert that the block raises ``exception`` with a message in which ``pattern`` is found.

    Raises:
        AssertionError: it raises something else, with another message, or nothing.
    """
    try:
        yield
    except exception as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(
                f"Expected the exception to match regex {pattern!r}, but got: {error}"
            ) from error
        return
    except Exception as error:
        raise AssertionError(
            f"Expected {exception.__name__} to be raised, instead got: {type(error).__name__}"
        ) from error
    raise AssertionError(f"Expected exception {exception.__name__} to be raised but none was")
