"""Operators that are not torch's own: which of their functions decide what is traced, and what these call.

The kernel of an operator runs in each call of a plan, as it is then. What a plan depends on is what ran while the graph was made: the function
that says what the kernel returns, and the formula of the gradient. Both are known of operators of ``torch.library.custom_op`` (and of
``fake.library``), and of others that have no gradient of their own. What an extension in C++ registers for them cannot be seen into.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from fxpasses.plans import _torch
from fxpasses.plans.code import attribute_names, global_names
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.origin import is_of_torch
from fxpasses.plans.watch import Watch

UNKNOWN = "an operator of another library that cannot be seen into"
_FOLLOWED = (types.FunctionType, types.MethodType, functools.partial, list, tuple, set, frozenset, dict)
_MODULES = 4
"""How many names lead from a module to an operator at most."""


def parts_of_operator(value: Any, watch: Watch) -> Iterator[tuple[str, Any]]:
    """What of an operator decides a trace, each with a name; nothing of one that counts with torch's version.

    Args:
        value: an operator, several of one name, or what ``custom_op`` has made.
        watch: what is to notice that these are others.

    Raises:
        NoPlan: it cannot be seen into.
    """
    for operator in _torch.foreign_operators(value):
        registered = _torch.registered(operator)
        if registered is None:
            raise NoPlan(UNKNOWN, str(operator))
        yield "schema", str(operator._schema)
        yield "tags", sorted(map(str, operator.tags))
        for owner, names in registered.watched:
            watch.attributes(owner, names)
        yield from registered.functions.items()
        yield "autocast", registered.autocast


def called_by(operators: Iterable[Any]) -> tuple[list[types.CodeType], list[str]]:
    """The code that runs while calls of operators are traced, and the names of all operators that it calls, these included.

    Raises:
        NoPlan: that cannot be told.
    """
    codes: dict[types.CodeType, None] = {}
    names: dict[str, None] = {}
    left = list(operators)
    while left:
        value = left.pop()
        if isinstance(value, functools.partial):
            left.append(value.func)
        elif isinstance(value, types.MethodType):
            raise NoPlan(UNKNOWN, f"a method, {value.__qualname__}")
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, types.FunctionType) and is_of_torch(value.__code__):
            left += [
                held for held in _closure(value) if isinstance(held, types.FunctionType)
            ]  # what it wraps
        elif isinstance(value, types.FunctionType):
            if value.__code__ not in codes:
                codes[value.__code__] = None
                left += _called(value)
        else:
            for operator in _torch.foreign_operators(value):
                if str(operator) not in names:
                    names[str(operator)] = None
                    left += [part for _, part in parts_of_operator(operator, Watch()) if callable(part)]
    return list(codes), list(names)


def _called(function: types.FunctionType) -> Iterator[Any]:
    """What a function may call: functions and operators that its globals, and modules among them, lead to.

    Raises:
        NoPlan: it may call something else.
    """
    code, known = function.__code__, function.__globals__
    held = [known[name] for name in global_names(code) if name in known]
    held += _closure(function)
    for _ in range(_MODULES):
        inside = [value for value in held if isinstance(value, types.ModuleType)]
        yield from (
            value for value in held if not isinstance(value, types.ModuleType) and _may_call(value, code)
        )
        held = [
            vars(module)[name] for module in inside for name in attribute_names(code) if name in vars(module)
        ]


def _closure(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _may_call(value: Any, code: types.CodeType) -> bool:
    """Whether a value may hold or be a function or an operator that is not torch's.

    Raises:
        NoPlan: it is an object or a class of others, of which any method may be called.
    """
    if _torch.operator_name(value) or isinstance(value, _FOLLOWED):
        return True
    kind = value if isinstance(value, type) else type(value)
    if _torch.is_trusted(kind):
        return False
    raise NoPlan(UNKNOWN, f"{code.co_qualname} reads an object of {kind.__module__}.{kind.__qualname__}")
