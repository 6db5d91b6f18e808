"""Introspection for :mod:`fxpasses.pass_manager.identity`: names that code reads, and where it is defined."""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import inspect
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def constants(code: types.CodeType) -> Iterator[Any]:
    """The constants of the code, without its docstring, which does not affect what the code does."""
    documented = code.co_consts and isinstance(code.co_consts[0], str) and not _reads_constant(code, 0)
    yield from code.co_consts[1:] if documented else code.co_consts


@functools.cache
def _reads_constant(code: types.CodeType, index: int) -> bool:
    return any(
        i.opname in ("LOAD_CONST", "RETURN_CONST") and i.arg == index for i in dis.get_instructions(code)
    )


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code reads, including those of nested functions."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(global_names(constant))
    return tuple(sorted(names))


@functools.cache
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that the code may read as attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(attribute_names(constant))
    return tuple(sorted(names))


_WRITING_METHODS = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "clear",
    "remove",
    "appendleft",
}


def is_state(code: types.CodeType, name: str, value: Any) -> bool:
    """Whether a closed-over variable is state: the code assigns to it, or may fill it as a container.

    Args:
        code: the code of the function that closes over it.
        name: the variable's name.
        value: its value.
    """
    instructions = list(dis.get_instructions(code))
    if any(i.opname == "STORE_DEREF" and i.argval == name for i in instructions):
        return True
    if not isinstance(value, (list, dict, set, deque)):
        return False
    return any(i.opname == "STORE_SUBSCR" for i in instructions) or not _WRITING_METHODS.isdisjoint(
        attribute_names(code)
    )


def generated_methods(kind: type) -> set[str]:
    """Names of the methods that ``dataclass`` generates, which follow from the fields."""
    if "__dataclass_fields__" not in vars(kind):
        return set()
    functions = {n: inspect.unwrap(v) for n, v in vars(kind).items() if isinstance(v, types.FunctionType)}
    return {name for name, function in functions.items() if function.__code__.co_filename == "<string>"}


def slots(kind: type) -> tuple[str, ...]:
    """The slots that the class itself declares."""
    declared = vars(kind).get("__slots__", ())
    return (declared,) if isinstance(declared, str) else tuple(declared)


def module_of(value: Any) -> str:
    """The module that defines a function or class, or the class of any other value."""
    if isinstance(value, (types.FunctionType, type)):
        return value.__module__ or ""
    return value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__


def top_level(module: str) -> str:
    """The top-level package of a module."""
    return module.partition(".")[0]


_INSTALLED = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@functools.cache
def is_installed(top: str) -> bool:
    """Whether a top-level module ships with Python or a distribution: its version then identifies it."""
    if top in sys.stdlib_module_names or top in ("", "torch"):
        return top != "__main__"
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and str(Path(file).resolve()).startswith(_INSTALLED)


@functools.cache
def version_of(top: str) -> str:
    """The version of a top-level module, or ``"unknown"``."""
    if top in sys.stdlib_module_names or not top:
        return sys.version
    module = sys.modules.get(top)
    found = getattr(module, "__version__", None)
    if found is None:
        try:
            found = importlib.metadata.version(top)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    return str(found)
