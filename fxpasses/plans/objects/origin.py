"""Where functions come from. The versions of torch and Python cover what their functions do, but not which of
them a name stands for."""

from __future__ import annotations

import functools
import os
import sysconfig
import types
from typing import Any

import torch

from fxpasses.plans.objects import _torch_notes

BUILTIN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip
DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
CACHE = type(functools.lru_cache(len))
"""The class of what ``lru_cache`` returns."""
_SOURCE_ROOTS = (os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep)


_MUTATION_GUARD = "_dynamo/mutation_guard.py"
"""Where Dynamo wraps ``Module.__init__`` and ``__setstate__`` when it first compiles in a process, to track
modules that are made later."""


def origin_of(value: Any) -> str:
    """Where a function, class or method is defined, and each that it wraps; "" for anything else. Dynamo's
    own wrappers are ignored."""
    found = []
    while value is not None:
        if (
            isinstance(value, types.FunctionType)
            and value.__code__.co_filename == _SOURCE_ROOTS[0] + _MUTATION_GUARD
        ):
            (value,) = (cell.cell_contents for cell in value.__closure__ or ())
        if _torch_notes.is_disabled_by_dynamo(value):
            value = value.__wrapped__
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, types.FunctionType):
            code = value.__code__
            file = code.co_filename.removeprefix(_SOURCE_ROOTS[0]).removeprefix(_SOURCE_ROOTS[1])
            found.append(f"{file}:{code.co_firstlineno} {code.co_qualname}")
        elif isinstance(value, (type, *BUILTIN, *DESCRIPTORS)):
            found.append(f"{getattr(value, '__module__', '')}: {value.__qualname__}")
        elif type(value) is not CACHE:
            break
        value = getattr(value, "__dict__", {}).get("__wrapped__")
    return "; ".join(found)


def is_third_party(value: Any) -> bool:
    """Whether it is neither built in nor defined in a file of torch or Python."""
    files = [part.partition(":")[0] for part in origin_of(value).split("; ")]
    return any(os.path.isabs(file) or file.startswith("<") for file in files)  # "<" is code that was typed in


TORCH_FOLDER = os.path.realpath(os.path.dirname(torch.__file__)) + os.sep
_HERE = os.path.realpath(__file__).split(os.sep)[:-4]
_OWN_FOLDERS = tuple(os.sep.join([*_HERE, package, ""]) for package in ("fake", "fxpasses"))
_STDLIB_FOLDER = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def is_covered_by_version(code: types.CodeType) -> bool:
    """Whether the version of torch or Python, or the source of this package, covers the code."""
    # The first calls methods of walked objects; the second is made from an operator's schema.
    if code.co_filename.startswith(("<frozen _collections_abc>", "<fake.library call of ")):
        return True
    file = os.path.realpath(code.co_filename)
    if file.startswith((TORCH_FOLDER, *_OWN_FOLDERS)):
        return True
    return is_stdlib_code(code)


def is_stdlib_code(code: types.CodeType) -> bool:
    """Whether code is Python's own. Packages installed beside it are not."""
    file = os.path.realpath(code.co_filename)
    return file.startswith(_STDLIB_FOLDER) and "site-packages" not in file.removeprefix(_STDLIB_FOLDER)
