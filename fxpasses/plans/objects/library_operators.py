"""Operators outside torch: which of their functions decide what is traced, and what these call.

The kernel of an operator runs in each call of a plan, as it is then. A plan depends on what ran while the
graph was made: the fake kernel and the gradient formula. Both are known for operators of
``torch.library.custom_op`` (and ``fake.library``), and for others without a gradient. What a C++ extension
registers for them cannot be inspected.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.code import attribute_names, codes_inside, global_names
from fxpasses.plans.objects.origin import is_covered_by_version
from fxpasses.plans.objects.watched_state import Watch

UNKNOWN = "an operator of another library that cannot be seen into"
_CONTAINERS = (list, tuple, set, frozenset, dict)
_FUNCTIONS = (types.FunctionType, functools.partial)
_FOLLOWED_KINDS = (*_FUNCTIONS, *_CONTAINERS)
_MAX_MODULE_DEPTH = 4
"""The most names from a module to an operator."""


def parts_of_operator(value: Any, watch: Watch) -> Iterator[tuple[str, Any]]:
    """What of an operator decides a trace, with names. Nothing if torch's version covers it.

    Args:
        value: an operator, an overload packet, or what ``custom_op`` returned.
        watch: to notice changes of these.

    Raises:
        NoPlan: it cannot be inspected.
    """
    for operator in _torch.foreign_operators(value):
        registrations = _torch.operator_registrations(operator)
        if registrations is None:
            raise NoPlan(UNKNOWN, str(operator))
        for owner, names in registrations.watched:
            watch.attributes(owner, names)
        constants = {
            "schema": str(operator._schema),
            "tags": sorted(map(str, operator.tags)),
            "autocast": registrations.autocast,
        }
        for name, part in (constants | dict(registrations.functions)).items():
            yield f"{operator} {name}", part  # of each overload


def operator_dependencies(operators: Iterable[Any]) -> tuple[list[types.CodeType], list[str]]:
    """The code that runs while calls of operators are traced, and the names of these operators and all that
    they call.

    Raises:
        NoPlan: they cannot be determined.
    """
    codes: dict[types.CodeType, None] = {}
    names: dict[str, None] = {}
    left, seen = list(operators), dict[int, Any]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            if not is_covered_by_version(value.__code__):
                codes[value.__code__] = None
                left += _values_to_follow(_values_read(value), value.__code__.co_qualname)
            left += [held for held in _closure_values(value) if isinstance(held, _FUNCTIONS)]  # what it wraps
        elif isinstance(value, functools.partial):
            held = [value.func, *value.args, *value.keywords.values()]
            left += _values_to_follow(held, f"a partial of {value.func!r}")
        elif isinstance(value, _CONTAINERS):
            left += _values_to_follow(value.values() if isinstance(value, dict) else value, "a container")
        elif hasattr(value, "__wrapped__"):
            left.append(value.__wrapped__)
        for operator in _torch.foreign_operators(value):
            if str(operator) not in names:
                names[str(operator)] = None
                left += [part for _, part in parts_of_operator(operator, Watch()) if callable(part)]
    return list(codes), list(names)


def _values_read(function: types.FunctionType) -> Iterator[Any]:
    """The values of the names that a function's code reads, from globals and modules among them, its closure
    and its defaults.

    Raises:
        NoPlan: it imports something outside torch and Python.
    """
    code, known = function.__code__, function.__globals__
    for inner in codes_inside(code):
        imported = (i.argval for i in dis.get_instructions(inner) if i.opname == "IMPORT_NAME")
        if any(name.partition(".")[0] not in _torch.TRUSTED_MODULES for name in imported):
            raise NoPlan(UNKNOWN, f"{code.co_qualname} imports")
    held = [known[name] for name in global_names(code) if name in known] + _closure_values(function)
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for _ in range(_MAX_MODULE_DEPTH):
        inside = [value for value in held if isinstance(value, types.ModuleType)]
        yield from (value for value in held if not isinstance(value, types.ModuleType))
        held = [
            vars(module)[name] for module in inside for name in attribute_names(code) if name in vars(module)
        ]


def _closure_values(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _values_to_follow(values: Iterable[Any], where: str) -> Iterator[Any]:
    """The values that may be, hold or call functions and operators outside torch.

    Raises:
        NoPlan: one is a foreign object or class, of which any method may be called.
    """
    for value in values:
        kind = value if isinstance(value, type) else type(value)
        if _torch.operator_name(value) or isinstance(value, _FOLLOWED_KINDS) or hasattr(value, "__wrapped__"):
            yield value
        elif not _torch.is_trusted(kind):
            raise NoPlan(UNKNOWN, f"{where} reads an object of {kind.__module__}.{kind.__qualname__}")
        elif isinstance(value, types.MethodType):
            raise NoPlan(UNKNOWN, f"{where} reads a method, {value.__qualname__}")
