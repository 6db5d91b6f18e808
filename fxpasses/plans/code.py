"""The content of code objects and what they read: names of globals and attributes."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

from fxpasses.plans.errors import NoPlan

__all__ = ["attribute_names", "code_digest", "codes_inside", "global_names"]


@functools.cache
def code_digest(code: types.CodeType) -> str:
    """A hash of what the code does: all of it but its file, lines and docstring's place.

    Raises:
        NoPlan: a constant of it is of a kind that code does not have.
    """
    parts: list[Any] = [
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable, code.co_qualname,
    ]  # fmt: skip
    parts += [_constant(constant) for constant in code.co_consts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return ("code", code_digest(value))
    if type(value) in (tuple, frozenset):
        parts = [_constant(item) for item in value]
        return (type(value).__name__, *(parts if type(value) is tuple else sorted(parts, key=repr)))
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str, bytes):
        return (type(value).__name__, repr(value))
    raise NoPlan("code with a constant of an unknown kind", type(value).__qualname__)


def codes_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_inside(constant)


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code reads or writes, those of the functions inside it included."""
    names = {
        instruction.argval
        for inner in codes_inside(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname.endswith(("_GLOBAL", "_NAME"))
    }
    return tuple(sorted(names))


@functools.cache
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that the code may read as attributes."""
    return tuple(sorted({name for inner in codes_inside(code) for name in inner.co_names}))
