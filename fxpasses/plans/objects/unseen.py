"""Code that may read more than a walk sees: names that give access to more, and uses that can be listed."""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Sequence

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.code import codes_inside, global_names, strings_of

ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names by which code reads environment variables."""
_ATTRIBUTES = frozenset({
    "grad_fn", "_version", "untyped_storage", "storage", "__subclasses__", "_backward_hooks",
    "__globals__", "__code__", "__closure__", "__builtins__", "__annotations__",
    "__doc__", "__abstractmethods__", "__slotnames__", "_abc_impl", "_base", "_is_view", "retains_grad", "output_nr", "is_shared", "is_pinned",
    "__callback__", "locked", "cache_info",
})  # fmt: skip
_UNSEEN = ENVIRONMENT | _ATTRIBUTES | {
    "globals", "locals", "vars", "eval", "exec", "compile", "__import__", "importlib", "inspect", "sys", "os", "gc",
    "time", "random", "datetime", "open", "input", "id", "hash", "memoryview", "ctypes", "threading", "weakref", "contextvars",
    "annotation", "return_annotation", "get_annotations", "get_type_hints",
    "locale", "pathlib", "tempfile", "subprocess", "socket", "uuid", "secrets", "resource", "decimal",
}  # fmt: skip
"""Names that give access to more than a walk over objects sees, or that change what they name."""

_ALLOWED_ATTRIBUTES = {
    "inspect": {"signature", "Parameter", "isclass"},  # made of code, defaults and attributes, all of which are walked over
    "sys": {"version_info", "platform", "maxsize", "byteorder"},
    "__code__": {"co_varnames", "co_argcount", "co_kwonlyargcount", "co_posonlyargcount", "co_flags"},  # part of a code's digest
}  # fmt: skip
"""What may be read of them: only what is part of a plan's key."""
READERS = frozenset(map(id, (
    getattr, hasattr, setattr, delattr, vars, dir, globals, locals, id, hash, os.getenv, sys.getrecursionlimit,
)))  # fmt: skip
"""Functions that tracing inlines and that are recognized by name, so nothing may hold them by another one."""
_IGNORED_OPCODES = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "RESUME", "NOP")


def environment_variables_read(code: types.CodeType) -> list[str]:
    """The environment variables that code reads.

    Raises:
        NoPlan: it may read something else that cannot be listed.
    """
    found = []
    if {"getattr", "hasattr"} & set(global_names(code)):
        named = strings_of(code) & _ATTRIBUTES
        if named:
            raise _refusal(code, min(named))
    for inner in codes_inside(code):
        if not _UNSEEN & set(inner.co_names):
            continue
        listed = [i for i in dis.get_instructions(inner) if i.opname not in _IGNORED_OPCODES]
        known = set()
        for position, instruction in enumerate(listed):
            name = instruction.argval
            if (
                instruction.opname == "LOAD_CONST"
                or type(name) is not str
                or name not in _UNSEEN
                or position in known
            ):
                continue
            owned = instruction.opname.startswith("LOAD_") and listed[position + 1].opname in (
                "LOAD_ATTR",
                "LOAD_METHOD",
            )
            attribute = listed[position + 1].argval if owned else None
            if attribute in _ALLOWED_ATTRIBUTES.get(name, ()):
                continue
            variable = (
                _environment_variable(listed, position) if name == "os" and attribute in ENVIRONMENT else None
            )
            if variable is None:
                raise _refusal(code, name)
            known.add(position + 1)
            found.append(variable)
    return found


def _environment_variable(listed: Sequence[dis.Instruction], position: int) -> str | None:
    """The variable that ``os.environ`` or ``os.getenv`` reads here, if its name is a literal."""
    behind = [*listed[position + 2 :], *[listed[-1]] * 4]
    if behind[0].opname == "CONTAINS_OP":
        named = listed[position - 1]
    elif behind[1].opname == "BINARY_SUBSCR":
        named = behind[0]
    else:
        if behind[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and behind[0].argval == "get":
            behind = behind[1:]
        elif listed[position + 1].argval != "getenv":
            return None
        if "CALL" not in (behind[1].opname, behind[2].opname) or not behind[1].opname.startswith(
            ("CALL", "LOAD_CONST")
        ):
            return None  # the name is computed
        named = behind[0]
    if named.opname != "LOAD_CONST" or type(named.argval) is not str:
        return None
    return named.argval


def _refusal(code: types.CodeType, name: str) -> NoPlan:
    return NoPlan("code that may read more than objects hold", f"{name} in {code.co_qualname}")
