"""Text of exceptions and reprs of objects. Both may be user-defined, so a raising ``__str__`` or ``__repr__``
must not hide the error."""

from __future__ import annotations

from typing import Any


def error_text(error: BaseException) -> str:
    """Return the exception's own text, or Python's placeholder for it if ``__str__`` raises.

    >>> class Broken(Exception):
    ...     def __str__(self):
    ...         raise RuntimeError
    >>> error_text(Broken()), error_text(ValueError("too small"))
    ('<exception str() failed>', 'too small')
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (whatever a user's method raises)
        return "<exception str() failed>"


def describe_error(error: BaseException) -> str:
    """Return the exception's type and text, as in the last line of a traceback.

    >>> describe_error(ValueError("too small")), describe_error(KeyError())
    ('ValueError: too small', 'KeyError')
    """
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its text.

    >>> first_line(ValueError("too small\\nby far"))
    'ValueError: too small'
    """
    lines = error_text(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def safe_repr(value: Any) -> str:
    """Return the object's ``repr``, or its type and address if that raises.

    >>> class Broken:
    ...     def __repr__(self):
    ...         raise RuntimeError
    >>> safe_repr(Broken()).partition(" at ")[0], safe_repr(2)
    ('<Broken', '2')
    """
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  (whatever a user's method raises)
        return f"<{type(value).__name__} at {id(value):#x}>"


def short_repr(value: Any, longest: int = 80) -> str:
    """Return `safe_repr` on one line, truncated if it is long: a value quoted in an error may be anything.

    >>> short_repr([1] * 1000, longest=10)
    '[1, 1, 1, ...'
    """
    shown = " ".join(safe_repr(value).split())
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
