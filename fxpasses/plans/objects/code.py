"""The content of code objects and what they read: names of globals and attributes."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

from fxpasses.plans.errors import NoPlan


@functools.cache
def code_digest(code: types.CodeType) -> str:
    """A hash of what the code does: everything except its file, lines and docstring's place.

    Raises:
        NoPlan: it has a constant of an unknown kind.
    """
    parts: list[Any] = [
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable, code.co_qualname,
    ]  # fmt: skip
    parts += [_constant_content(constant) for constant in code.co_consts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant_content(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return ("code", code_digest(value))
    if type(value) in (tuple, frozenset):
        parts = [_constant_content(item) for item in value]
        return (type(value).__name__, *(parts if type(value) is tuple else sorted(parts, key=repr)))
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str, bytes):
        return (type(value).__name__, repr(value))
    raise NoPlan("code with a constant of an unknown kind", type(value).__qualname__)


def codes_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and all code that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_inside(constant)


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code, or functions inside it, read or write."""
    return tuple(sorted({name for inner in codes_inside(code) for _, name in global_accesses(inner)}))


def global_accesses(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Each operation of the code on a global name, with the name. Ten times as fast as ``dis``, which makes
    an object for each operation."""
    high_bits = 0
    for opcode, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= high_bits
        high_bits = argument << 8 if opcode == dis.EXTENDED_ARG else 0
        if opcode in _GLOBAL_OPCODES:
            name = dis.opname[opcode]
            yield name, code.co_names[argument >> 1 if name == "LOAD_GLOBAL" else argument]


_GLOBAL_OPCODES = frozenset(
    number for name, number in dis.opmap.items() if name.endswith(("_GLOBAL", "_NAME"))
)


@functools.cache
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that the code may read as attributes."""
    return tuple(sorted({name for inner in codes_inside(code) for name in inner.co_names}))


@functools.cache
def strings_of(code: types.CodeType) -> frozenset[str]:
    """The strings among the constants of the code, which may be attribute names."""
    return frozenset(c for inner in codes_inside(code) for c in inner.co_consts if isinstance(c, str))
