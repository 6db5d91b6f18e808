"""The lines of a pass that an exception went through: what its author has to look at."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback

import torch

import fake
from fxpasses.pass_manager.contract import FunctionPass, Pass

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.join(_PACKAGE, "passes") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_OTHERS = tuple(os.path.dirname(package.__file__ or "") + os.sep for package in (torch, fake))
_MOST_LINES = 6


def lines_of_pass(item: Pass, error: BaseException) -> list[str]:
    """``file:line in function: code`` for the frames of the pass and what it calls, the innermost last.

    Frames of torch and of what runs passes are left out, and the outermost ones where there are more than a few. Where the exception went
    through none (an ``apply`` that takes other arguments), the line of the pass's definition is given.
    """
    found = [
        f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_of_pass(frame.filename)
    ]
    if len(found) > _MOST_LINES:
        left_out = len(found) - _MOST_LINES + 1
        found = [found[0], f"... {left_out} more", *found[left_out + 1 :]]
    return found or _definition(item)


def _is_of_pass(file: str) -> bool:
    if file.startswith(_LIBRARY):
        return True
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (standard or file.startswith((_PACKAGE, *_OTHERS, "<frozen")))


def _definition(item: Pass) -> list[str]:
    what = inspect.unwrap(item.function) if isinstance(item, FunctionPass) else type(item).apply
    code = getattr(what, "__code__", None)
    return [f"{code.co_filename}:{code.co_firstlineno}, where it is defined"] if code is not None else []
