"""Functions of torch, told from others that somebody has put in their places.

What torch's code does counts with its version. Which functions it calls does not: ``torch.nn.functional.linear`` and methods of
``torch.Tensor`` are names like others. A plan lists those that traced code and functions in the graph name, with what they stood for.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.code import attribute_names, global_names
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.origin import is_of_others, origin_of
from fxpasses.plans.reads import Read, is_of_torch, loaded_modules, resolve
from fxpasses.plans.walk import Walk

Named = tuple[str, str, str]
"""The name of a module, the names that lead from it to a function, and where that is defined."""


def functions_named_by(codes: Sequence[types.CodeType]) -> list[Named]:
    """What the code of torch that was traced, or is in the graph, is called and calls itself."""
    found: dict[Named, None] = {}
    by_file = loaded_modules()
    for code in dict.fromkeys(codes):
        if not is_of_torch(code):
            continue
        for module in by_file[code.co_filename]:
            for path in (code.co_qualname, *_calls(code, module)):
                if origin := origin_of(_at(module, path)):
                    found[module.__name__, path, origin] = None
    return list(found)


def of_later_modules(reads: Iterable[Read]) -> tuple[list[Read], list[Named]]:
    """Tell apart what is read in modules that torch imports when somebody asks for them, as ``torch._dynamo`` in ``torch._dynamo.graph_break()``.

    A process that takes a plan has not imported them, and nobody can have replaced what is in them: functions there are compared by name, where they are loaded.

    Args:
        reads: what traced code reads.

    Returns:
        What has to be there, and the functions of these modules.
    """
    there: list[Read] = []
    later: list[Named] = []
    for read in reads:
        last = next((i for i in range(len(read), 2, -1) if _torch.is_imported_later(resolve(read[:i]))), 0)
        value = resolve(read)
        if not last or not (last == len(read) or isinstance(value, types.ModuleType) or origin_of(value)):
            there.append(read)
        elif origin := origin_of(value):
            module: Any = resolve(read[:last])
            later.append((module.__name__, ".".join(read[last:]), origin))
    return there, later


def _calls(code: types.CodeType, module: types.ModuleType) -> Iterator[str]:
    names = attribute_names(code)
    for name in global_names(code):
        value = vars(module).get(name)
        yield name
        for inside in names if isinstance(value, types.ModuleType) else ():
            yield f"{name}.{inside}"
            if isinstance(owner := vars(value).get(inside), types.ModuleType):
                yield from (f"{name}.{inside}.{last}" for last in names if last in vars(owner))


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, "__dict__", {}).get(name)
    return value


def are_named_still(functions: Sequence[Sequence[str]]) -> bool:
    """Whether these names stand for what they did; those of modules that are not loaded do."""
    return all(
        module not in sys.modules or origin_of(_at(sys.modules[module], path)) == origin
        for module, path, origin in functions
    )


def watch_names(walk: Walk, functions: Sequence[Sequence[str]]) -> None:
    """Have a walk watch whether they go on to do so."""
    seen = set()
    for module, path, _ in functions:
        owner = sys.modules.get(module)
        for name in path.split("."):
            values = getattr(owner, "__dict__", {})
            if isinstance(owner, types.ModuleType) and (id(values), name) not in seen:
                seen.add((id(values), name))
                walk.watch.entry(values, name)
            owner = values.get(name)


def check_methods(codes: Sequence[types.CodeType]) -> None:
    """Ask that methods of tensors are those of torch, where code may call them.

    Raises:
        NoPlan: somebody has put others there, which are called while graphs are traced.
    """
    named = {name for code in dict.fromkeys(codes) for name in attribute_names(code)}
    for name, method in (*vars(torch.Tensor).items(), *vars(torch.nn.Parameter).items()):
        if (name in named or name.startswith("__")) and is_of_others(method):
            raise NoPlan("a method of tensors that is not torch's own", name)
