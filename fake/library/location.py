"""Find the line of user code that registers something: messages name it, not a frame of ours or torch's."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake.seam import library as _torch

#: Files that register on behalf of others. ``contextlib`` calls the body of `scoped_library`.
_SKIPPED_FILES = (str(Path(__file__).parent), *_torch.REGISTRATION_FILES, contextlib.__file__)
#: On one line, so that its whole frame reports the line number of its first line.
_CALL_CODE = (lambda function, args, kwargs: function(*args, **kwargs)).__code__


@dataclass(frozen=True)
class Location:
    """A line of a file, and the globals of the module that it belongs to."""

    filename: str
    line: int
    module_globals: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


def user_location(stacklevel: int = 1) -> Location:
    """Return the innermost line of the call stack that is neither in this package nor
    in torch's registration code.

    Args:
        stacklevel: 2 for the caller of that line, and so on, for a user's function that registers for its
            callers. A stack that is not that deep yields its outermost line.
    """
    frame: types.FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame = frame.f_back
    for _ in range(stacklevel - 1):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_globals)


def call_at(location: Location, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` from a frame that claims to be at ``location``.

    torch's registration functions take the location for the dispatcher's messages from their caller's frame.
    """
    code = _CALL_CODE.replace(co_filename=location.filename, co_firstlineno=location.line)
    return types.FunctionType(code, location.module_globals)(function, args, kwargs)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the user's line, however deep in this package the cause is found."""
    location = user_location()
    module = location.module_globals.get("__name__", "<unknown>")
    seen = location.module_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, location.filename, location.line, module, seen)
