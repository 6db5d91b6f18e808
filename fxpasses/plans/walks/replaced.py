"""Detection of replaced functions of torch.

Torch's version covers what torch's code does, but not which functions it calls:
``torch.nn.functional.linear`` and methods of ``torch.Tensor`` are ordinary names. A plan lists the functions
that traced code and the graph name, with their origins. Those that are not torch's own are read in full, since
their code may change in place.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.code import attribute_names, global_names
from fxpasses.plans.objects.origin import is_third_party, origin_of
from fxpasses.plans.walks.reads import Read, is_covered_by_version, loaded_modules, resolve
from fxpasses.plans.walks.walk import Walk

NamedFunction = tuple[str, str, str]
"""The name of a module, the path of names from it to a function, and where the function is defined."""


def torch_functions_in(codes: Sequence[types.CodeType]) -> list[NamedFunction]:
    """The torch functions among ``codes`` (traced or in the graph), and those that they call."""
    found = ((module, path, origin_of(value)) for module, path, value in _values_named_in(codes))
    return list(dict.fromkeys(named for named in found if named[-1]))


def replacements_in(codes: Sequence[types.CodeType]) -> list[Read]:
    """What has been put in the place of torch functions that ``codes`` call. No version covers its code."""
    found = _values_named_in(codes)
    return list(
        dict.fromkeys((module, *path.split(".")) for module, path, value in found if _is_foreign(value))
    )


def _values_named_in(codes: Sequence[types.CodeType]) -> Iterator[tuple[str, str, Any]]:
    """The torch functions among ``codes``, and all that they name: module, path and value."""
    by_file = loaded_modules()
    for code in dict.fromkeys(codes):
        for module in by_file[code.co_filename] if is_covered_by_version(code) else ():
            for path in (code.co_qualname, *_called_names(code, module)):
                yield module.__name__, path, _value_at(module, path)


def _is_foreign(value: Any) -> bool:
    """Whether it is a function, or an object that is called like one, of neither torch nor Python."""
    if isinstance(value, types.FunctionType):
        return not is_covered_by_version(value.__code__)
    if not callable(value) or origin_of(value):
        return False
    return isinstance(value, functools.partial) or not _torch.is_trusted(type(value))


def split_lazy_module_reads(reads: Iterable[Read]) -> tuple[list[Read], list[NamedFunction]]:
    """Split off reads of torch modules that are imported on first use, such as ``torch._dynamo`` in
    ``torch._dynamo.graph_break()``.

    A process that loads a plan has not imported them, so nobody can have replaced their content. Their
    functions are compared by name, where they are loaded.

    Args:
        reads: what traced code reads.

    Returns:
        What has to be there, and the functions of these modules.
    """
    there: list[Read] = []
    later: list[NamedFunction] = []
    for read in reads:
        last = next((i for i in range(len(read), 2, -1) if _torch.is_lazy_module(resolve(read[:i]))), 0)
        value = resolve(read)
        if not last or not (last == len(read) or isinstance(value, types.ModuleType) or origin_of(value)):
            there.append(read)
        elif origin := origin_of(value):
            module: Any = resolve(read[:last])
            later.append((module.__name__, ".".join(read[last:]), origin))
    return there, later


def _called_names(code: types.CodeType, module: types.ModuleType) -> Iterator[str]:
    names = attribute_names(code)
    for name in global_names(code):
        value = vars(module).get(name)
        yield name
        for inside in names if isinstance(value, types.ModuleType) else ():
            yield f"{name}.{inside}"
            if isinstance(owner := vars(value).get(inside), types.ModuleType):
                yield from (f"{name}.{inside}.{last}" for last in names if last in vars(owner))


def _value_at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, "__dict__", {}).get(name)
    return value


def are_functions_unchanged(functions: Sequence[Sequence[str]]) -> bool:
    """Whether these names still stand for the same functions. Names in modules that are not loaded do."""
    return all(
        module not in sys.modules or origin_of(_value_at(sys.modules[module], path)) == origin
        for module, path, origin in functions
    )


def watch_names(walk: Walk, functions: Sequence[Sequence[str]]) -> None:
    """Have a walk watch these names for replacement."""
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
    """Check that methods of tensors that code may call are torch's own.

    Raises:
        NoPlan: one was replaced; it would be called while graphs are traced.
    """
    named = {name for code in dict.fromkeys(codes) for name in attribute_names(code)}
    for name, method in (*vars(torch.Tensor).items(), *vars(torch.nn.Parameter).items()):
        if (name in named or name.startswith("__")) and is_third_party(method):
            raise NoPlan("a method of tensors that is not torch's own", name)
