"""What traced code reads that belongs to no object of the model: globals, and attributes of modules.

The reads are listed by name when a plan is made, and looked up again before it is used. Code that might read
something that cannot be listed rules a plan out.
"""

from __future__ import annotations

import builtins
import collections
import dis
import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.parameter_gradients import facts_of_gradients
from fxpasses.plans.objects._torch_optimizers import (
    GROUPS,
    PARAMETER_ATTRIBUTES,
    Option,
    init_optimizer_state,
    is_optimizer_step,
    may_read_parameters,
)
from fxpasses.plans.objects.code import (
    attribute_names,
    code_digest,
    codes_inside,
    global_accesses,
    global_names,
    strings_of,
)
from fxpasses.plans.objects.hooks_of_modules import ALL_HOOKS
from fxpasses.plans.objects.named_attributes import Names, names_from
from fxpasses.plans.objects.origin import TORCH_FOLDER, is_covered_by_version
from fxpasses.plans.objects.unseen import ENVIRONMENT, environment_variables_read
from fxpasses.plans.walks.walk import Walk

Read = tuple[str, ...]
"""The name of a module, one of its globals, and attributes; or an environment variable, or an operator."""
_VARIABLE, _OPERATOR, _RESULT = "environment variable", "operator of a library", "constant result"
_ATTRIBUTES = "attributes of objects"
_STEPS, _PARAMETERS, _GRADIENTS = "optimizer that is stepped", "parameters of optimizers", "gradients"
OBJECT_READS = (_ATTRIBUTES, _STEPS, _PARAMETERS, _GRADIENTS)
"""Kinds of reads from objects that a walk has met."""
_STATE_DICT_HOOKS = {name for name in ALL_HOOKS if "state_dict" in name}


def reads_of(codes: Sequence[types.CodeType]) -> list[Read]:
    """What traced code reads.

    Raises:
        NoPlan: some of it cannot be listed.
    """
    found: dict[Read, None] = {}
    by_file = loaded_modules()
    for code in codes:
        if is_covered_by_version(code) or _is_environ_code(code):
            if ENVIRONMENT & set(attribute_names(code)) and not _is_environ_code(code):
                raise NoPlan("functions of torch or Python that read environment variables", code.co_qualname)
            if _STATE_DICT_HOOKS & set(attribute_names(code)):
                raise NoPlan("a state dictionary is made or loaded", code.co_qualname)
            found |= dict.fromkeys(_settings_read(code, by_file[code.co_filename]))
            continue
        for name in environment_variables_read(code):
            found[_VARIABLE, name] = None
        names = set(attribute_names(code))
        strings = strings_of(code)
        if (names | strings) & set(ALL_HOOKS):
            raise NoPlan("code that reads the hooks of a module", code.co_qualname)
        modules = by_file[code.co_filename]
        dynamic = "getattr" in global_names(code) or "hasattr" in global_names(code)
        for module in _imported_modules(code, modules):
            for name in sorted(names & vars(module).keys()):
                found |= dict.fromkeys(_attribute_reads(module, (module.__name__, name), names))
        for module in modules:
            for name in global_names(code):
                for read in _attribute_reads(
                    module, (module.__name__, name), names | (strings if dynamic else set())
                ):
                    found[read] = None
                    value = resolve(read)
                    if isinstance(value, types.ModuleType):
                        _check_no_dynamic_attributes(code, value, read[1:])
                    anything = dynamic or "__dict__" in names
                    if anything and isinstance(value, types.ModuleType) and not _is_trusted_module(value):
                        where = f"{'getattr' if dynamic else '__dict__'} in {code.co_qualname}"
                        raise NoPlan("code that may read any attribute of a module", where)
    return list(found)


def _imported_modules(
    code: types.CodeType, modules: Sequence[types.ModuleType]
) -> Iterator[types.ModuleType]:
    """The modules that code imports itself. Their attributes are listed like globals.

    Raises:
        NoPlan: they cannot be determined.
    """
    for inner in codes_inside(code):
        if all(operation != "IMPORT_NAME" for operation, _ in global_accesses(inner)):
            continue
        listed = [i for i in dis.get_instructions(inner) if i.opname not in _IGNORED_OPCODES]
        for level, named, instruction in zip(listed, listed[1:], listed[2:], strict=False):
            if instruction.opname != "IMPORT_NAME":
                continue
            for importing in modules:
                package = importing.__package__ or ""
                path = importlib.util.resolve_name("." * level.argval + instruction.argval, package)
                for module in map(sys.modules.get, {path, path.partition(".")[0]}):
                    if module is None:
                        continue  # this import has not been traced
                    names = (named.argval or ()) if module.__name__ == path else ()
                    if isinstance(module, _torch.PropModule) or not set(names) <= vars(module).keys():
                        raise NoPlan("code that imports", f"{path} in {code.co_qualname}")
                    yield module


def _check_no_dynamic_attributes(code: types.CodeType, module: types.ModuleType, path: Sequence[str]) -> None:
    """Check that code reads nothing from a module that only a function of the module, not its dictionary,
    would supply.

    Raises:
        NoPlan: it may.
    """
    if _is_trusted_module(module) or (type(module) is types.ModuleType and "__getattr__" not in vars(module)):
        return
    for inner in codes_inside(code):
        listed = [i for i in dis.get_instructions(inner) if i.opname not in _IGNORED_OPCODES]
        for start in range(len(listed) - len(path)):
            names = [i.argval for i in listed[start : start + len(path)]]
            if names == list(path) and listed[start].opname.startswith("LOAD_"):
                behind = listed[start + len(path)]
                if behind.opname not in ("LOAD_ATTR", "LOAD_METHOD") or behind.argval not in vars(module):
                    raise NoPlan(
                        "code that asks a module for what it makes", f"{'.'.join(path)} in {code.co_qualname}"
                    )


def _settings_read(code: types.CodeType, modules: Sequence[types.ModuleType]) -> Iterator[Read]:
    """The plain globals of torch that one of its functions reads. Torch's version covers the rest."""
    if not code.co_filename.startswith(TORCH_FOLDER):
        return
    for module in modules:
        if _torch.is_imported_with_torch(module):
            for name in global_names(code):
                if type(resolve((module.__name__, name))) in _PLAIN and name not in _torch.TRACING_FLAGS:
                    yield module.__name__, name


def _is_environ_code(code: types.CodeType) -> bool:
    """Whether code looks up an environment variable. Its caller says which one."""
    return code.co_filename == "<frozen os>" and code.co_qualname.startswith(
        ("_createenviron.", "_Environ.", "getenv")
    )


def loaded_modules() -> Mapping[str, list[types.ModuleType]]:
    """The loaded modules, by file."""
    found: dict[str, list[types.ModuleType]] = collections.defaultdict(list)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            found[file].append(module)
    return found


def _is_trusted_module(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _torch.TRUSTED_MODULES


def _attribute_reads(module: types.ModuleType, read: Read, names: set[str]) -> Iterator[Read]:
    yield read
    value = resolve(read)
    if isinstance(value, _torch.PropModule):
        raise NoPlan("code that reads settings of torch.backends", ".".join(read))
    if isinstance(value, types.ModuleType) and len(read) < 6:
        for name in sorted(names):
            inside = vars(value).get(name, _ABSENT)
            if inside is not _ABSENT and inside is not module and inside is not os.environ:
                yield from _attribute_reads(module, (*read, name), names)


_ABSENT = object()
_IGNORED_OPCODES = ("CACHE", "EXTENDED_ARG")
_PLAIN = (bool, int, float, str, type(None))


def resolve(read: Sequence[str]) -> object:
    """The current value of a name that is read."""
    value: object = sys.modules.get(read[0], _ABSENT)
    for depth, name in enumerate(read[1:]):
        content = getattr(value, "__dict__", {})
        value = content.get(name, _ABSENT)
        if value is _ABSENT and depth == 0:
            value = getattr(builtins, name, _ABSENT)
    return value


def walk_reads(walk: Walk, reads: Sequence[Read], expected: str | None = None) -> str:
    """Walk what is read now, after the model; returns the digest of its content.

    Args:
        walk: the walk, which continues.
        reads: what is read.
        expected: the digest that it had, if any. The state of an optimizer is made only if all before it is
            the same.

    Raises:
        NoPlan: it holds something that cannot be walked.
    """
    digests = list[str]()
    for read in reads:
        if read[0] == _STEPS:
            if expected is not None and expected.startswith("".join(f"{digest}:" for digest in digests)):
                init_optimizer_state(walk.optimizers)
            digests.append(str(len(walk.optimizers)))
            continue
        if read[0] == _OPERATOR:
            operator = _torch.find_operator(read[1])
            digests.append("absent" if operator is None else walk.add(read[1], operator))
            continue
        if read[0] == _ATTRIBUTES:
            digests.append(walk.close(names_from(json.loads(read[1]))))
            continue
        if read[0] == _PARAMETERS:
            digests.append(_walk_parameters(walk, ".".join(read), json.loads(read[1])))
            continue
        if read[0] == _GRADIENTS:
            walk.gradients = facts_of_gradients(walk.tensors)
            digests.append(walk.add(".".join(read), list(map(repr, walk.gradients))))
            continue
        if read[0] == _RESULT:
            digests.append(_call_result(*read[1:]))
            continue
        if read[0] == _VARIABLE:
            digests.append(walk.add(".".join(read), os.environ.get(read[1])))
            variables = os.environ._data  # type: ignore[attr-defined]
            walk.watch.entry(variables, os.environ.encodekey(read[1]))  # type: ignore[attr-defined]
            continue
        module = sys.modules.get(read[0])
        content = getattr(module, "__dict__", {})
        if module is None:  # traced code imports it
            walk.watch.entry(sys.modules, read[0])
        walk.watch.entry(content, read[1])
        if read[1] not in content:
            walk.watch.entry(vars(builtins), read[1])
        if len(read) > 2:
            owner = resolve(read[:-1])
            walk.watch.entry(getattr(owner, "__dict__", {}), read[-1])
        value = resolve(read)
        digests.append("absent" if value is _ABSENT else walk.add(".".join(read), value))
        if any(value is function for function in _torch.HARDWARE_QUERIES):
            digests.append(repr(value()))  # type: ignore[operator]
    return ":".join(digests)


def _walk_parameters(walk: Walk, label: str, options: Sequence[Option]) -> str:
    """Walk what the optimizers that a walk has met hold of parameters; returns the digest.

    Args:
        walk: the walk, which continues.
        label: the name of this in its story.
        options: floats of the only optimizer whose values are left open.

    Raises:
        NoPlan: they hold something that cannot be walked.
    """
    digests = []
    for i, optimizer in enumerate(walk.optimizers):
        for name in sorted(PARAMETER_ATTRIBUTES & vars(optimizer).keys()):
            part = vars(optimizer)[name]
            if name == GROUPS and options:
                walk.watch.sequence(part)
                part = tuple(
                    _watch_all_but(walk, group, {k for i, k in options if i == n})
                    for n, group in enumerate(part)
                )
            digests.append(walk.add(f"{label}[{i}].{name}", part))
    return ":".join(digests)


def _watch_all_but(walk: Walk, group: dict[str, Any], left: set[str]) -> tuple[tuple[str, Any], ...]:
    walk.watch.keys(group)
    for name in group:
        if name not in left:
            walk.watch.entry(group, name)
    return tuple((name, type(value).__name__ if name in left else value) for name, value in group.items())


def reads_of_optimizers(
    walk: Walk, codes: Sequence[types.CodeType], options: Sequence[Option], *, gradients: bool
) -> list[Read]:
    """What is read of optimizers and gradients, in the order in which to check it.

    Args:
        walk: over the model, its objects, and all else that is read.
        codes: what was traced.
        options: the floats among the optimizer's options that are inputs of the graph.
        gradients: whether any are read.

    Raises:
        NoPlan: there are several optimizers, and one is stepped.
    """
    found: list[Read] = []
    steps = any(map(is_optimizer_step, codes))
    if (steps or options) and len(walk.optimizers) != 1:
        raise NoPlan("several optimizers, of which one is stepped")
    if steps:
        found.append((_STEPS, "state"))
    if walk.optimizers and may_read_parameters(codes):
        found.append((_PARAMETERS, json.dumps(options)))
    if gradients:
        found.append((_GRADIENTS, "of parameters"))
    return found


def read_of_attributes(names: Names) -> Read:
    """The read of attributes with these names, of objects that a walk leaves open."""
    return _ATTRIBUTES, json.dumps(names.as_data())


def read_of_operator(name: str) -> Read:
    """The read of an operator that is not torch's, by its name with the overload."""
    return _OPERATOR, name


def read_of_result(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Read:
    """The read of the result of a function that is marked as constant. Each process calls it once.

    Args: the function and its arguments.

    Raises:
        NoPlan: the function has no name, or its arguments or result cannot be serialized.
    """
    module, path = function.__module__, function.__qualname__
    if inspect.unwrap(resolve((module, *path.split(".")))) is not inspect.unwrap(function):  # type: ignore[arg-type]
        raise NoPlan("a function whose results stand for constants, and that no name leads to", path)
    given = json.dumps([args, kwargs], default=repr)
    if json.loads(given) != [args, kwargs] or type(function(*args, **kwargs)) not in _PLAIN:
        raise NoPlan("a function whose results stand for constants that cannot be written down", path)
    return _RESULT, module, path, given


def _call_result(module: str, path: str, given: str) -> str:
    function: Any = resolve((module, *path.split(".")))
    args, kwargs = json.loads(given)
    return "absent" if function is _ABSENT else repr(function(*args, **kwargs))


def check_covered(codes: Sequence[types.CodeType], walk: Walk) -> None:
    """Check that the walk has met all traced code.

    Raises:
        NoPlan: it has not.
    """
    by_file = loaded_modules()
    for code in codes:
        if code_digest(code) in walk.unwalkable_codes:
            raise NoPlan("a traced function that holds what cannot be seen into", code.co_qualname)
        if is_covered_by_version(code) or _is_environ_code(code):
            continue
        if code_digest(code) not in walk.codes:
            raise NoPlan("traced code that no object holds", code.co_qualname)
        if global_names(code) and not by_file[code.co_filename] and code_digest(code) not in walk.made_codes:
            raise NoPlan("code of no module", f"{code.co_qualname} in {code.co_filename}")
