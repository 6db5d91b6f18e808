"""Frames that do more than call their graph. Dynamo's code for them is part of the plan and runs unchanged.

After a graph break that code continues in eager and ends by calling a resume function, which Dynamo generates
and which has plans of its own.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import hashlib
import importlib
import itertools
import marshal
import types
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from fake.seam.eval_frame import reset_code
from fxpasses.plans._torch import eager_callable
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks.between import Functions, Stub, without_hook
from fxpasses.plans.graph_breaks.resumed import RESUME_PREFIX, ResumeFunction
from fxpasses.plans.objects.code import global_accesses

Function = Callable[..., Any]
PYTHON = "python"
"""The kind of a plan of a call without a graph of its own: only what it calls has graphs."""
_GRAPH_PREFIX, _DYNAMO_UTILS = "__compiled_fn", "torch._dynamo.utils"


def function_of(model: Any) -> tuple[types.FunctionType, tuple[Any, ...]]:
    """The function whose frame the call of a model is, and the arguments before those of the call.

    Raises:
        NoPlan: it is neither a function nor a method.
    """
    called = model.forward if isinstance(model, torch.nn.Module) else model
    if isinstance(called, types.MethodType) and isinstance(called.__func__, types.FunctionType):
        return called.__func__, (called.__self__,)
    if isinstance(called, types.FunctionType):
        return called, ()
    raise NoPlan("a graph break in what is neither a function nor a method")


def inline_wrapper(fn: Any) -> Any:
    """A function that calls ``fn``. Through it, Dynamo traces what it would otherwise skip, such as modules
    of torch. Its code needs a variable of that name."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return inner


CALLED: Mapping[str, Callable[[Any], Any]] = {
    "module": lambda model: model,
    "call": lambda model: model.__call__,
}
"""What such a function calls of a model."""


def forget_compiled(model: Any) -> None:
    """Drop everything that Dynamo has compiled for the frame of a model's call, whoever asked for it."""
    try:
        function, _ = function_of(model)
    except NoPlan:
        return
    reset_code(function.__code__)


def calls_graph(code: types.CodeType) -> bool:
    """Whether Dynamo's code for a frame calls a compiled graph."""
    return any(name.startswith(_GRAPH_PREFIX) for _, name in global_accesses(code))


def nested_resume_names(code: types.CodeType) -> frozenset[str]:
    """The resume functions that a frame does not call itself, but passes to the one that it calls.

    With ``nested_graph_breaks``, the function in which the graph ended resumes first, and then its caller,
    which had inlined it.

    Args:
        code: what Dynamo wrote.
    """
    found: list[str] = []
    # Since the last return: a frame ends by calling the resume function whose name it loads last.
    named: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL" and str(instruction.argval).startswith(RESUME_PREFIX):
            named.append(instruction.argval)
        elif instruction.opname.startswith("RETURN_"):
            found += named[:-1]
            named.clear()
    return frozenset(found)


def describe_frame(
    function: types.FunctionType,
    code: types.CodeType,
    resumed: Mapping[str, ResumeFunction],
    read: Set[str] = frozenset(),
) -> tuple[dict[str, list[str]], bytes]:
    """A frame as plain data.

    That is what the names mean that Dynamo put among its globals, its code, and that of the functions it
    resumes with.

    Args:
        function: whose frame it is.
        code: what Dynamo wrote for it.
        resumed: see :func:`~fxpasses.plans.graph_breaks.resumed.resume_functions`.
        read: globals of its module that the plan checks besides those that the function names.

    Raises:
        NoPlan: the code needs objects of this process.
    """
    values, own = function.__globals__, {name for _, name in global_accesses(function.__code__)} | read
    handed = nested_resume_names(code)
    names: dict[str, list[str]] = {}
    for how, name in global_accesses(code):
        value = values.get(name)
        if how != "LOAD_GLOBAL":
            raise NoPlan("a frame that sets globals", name)
        if name.startswith(_GRAPH_PREFIX):
            names[name] = ["graph"]
        elif name in resumed:
            names[name] = ["handed"] if name in handed else ["resume"]
            if resumed[name].values is not values or (name in handed and resumed[name].code.co_freevars):
                raise NoPlan("a frame that goes on in other modules, or with cells of several functions")
        elif isinstance(value, types.ModuleType) and name not in own:
            names[name] = ["module", value.__name__]
        elif value is vars(builtins):
            names[name] = ["builtins"]
        elif name not in own and (name in values or not hasattr(builtins, name)):
            raise NoPlan("the frame reads a global", name)
    if list(names.values()).count(["graph"]) > 1:
        raise NoPlan("the frame has several graphs")
    if code.co_freevars != function.__code__.co_freevars:
        raise NoPlan("a frame with cells of its own")
    listed = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    kept = _module_copies(listed, names)
    for place in sorted(kept, reverse=True):
        del listed[place : place + 2]
    pairs = list(itertools.pairwise(listed))
    # Locals that hold the module, from Dynamo of torch 2.15. Python 3.13 has opcodes for two locals.
    module_locals = set(kept.values()) | {
        _local_names(then)[0]
        for loads, then in pairs
        if _loads_dynamo_utils(loads, names) and then.opname.startswith("STORE_FAST")
    }
    for loads, then in pairs:
        uses_utils = _loads_dynamo_utils(loads, names) or (
            "LOAD_FAST" in loads.opname and _local_names(loads)[-1] in module_locals
        )
        known = then.opname.startswith("LOAD_") and hasattr(_UTILS_SUBSTITUTE, str(then.argval))
        if (
            uses_utils
            and not known
            and not (then.opname.startswith("STORE_FAST") and _local_names(then)[0] in module_locals)
        ):
            raise NoPlan("the frame calls functions of Dynamo", str(then.argval))
    try:
        codes = {name: (one.code, one.filled) for name, one in resumed.items() if name in names}
        return names, marshal.dumps((*_without_objects(code), codes))
    except ValueError:
        raise NoPlan("a frame whose code holds objects") from None


def _without_objects(code: types.CodeType) -> tuple[types.CodeType, dict[int, tuple[str, Any]]]:
    """Code as data, and replacements for constants that are objects of every process: built-in classes, sizes
    of tensors and the like."""
    kept: list[Any] = list(code.co_consts)
    objects: dict[int, tuple[str, Any]] = {}
    for i, constant in enumerate(kept):
        if isinstance(constant, torch.Size):
            kept[i], objects[i] = None, ("size", tuple(constant))
        elif isinstance(constant, torch.device):
            kept[i], objects[i] = None, ("device", str(constant))
        elif isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            kept[i], objects[i] = None, ("torch", str(constant).removeprefix("torch."))
        elif isinstance(constant, type) and _is_builtin(constant):
            kept[i], objects[i] = None, ("builtin", constant.__name__)
    return code.replace(co_consts=tuple(kept)), objects


def _is_builtin(kind: type) -> bool:
    return vars(builtins).get(kind.__name__) is kind


def _with_objects(code: types.CodeType, objects: Mapping[int, tuple[str, Any]]) -> types.CodeType:
    constants = list(code.co_consts)
    for i, (kind, value) in objects.items():
        constants[i] = _OBJECT_MAKERS[kind](value)
    return code.replace(co_consts=tuple(constants))


_OBJECT_MAKERS: dict[str, Callable[[Any], Any]] = {
    "size": torch.Size,
    "device": torch.device,
    "torch": functools.partial(getattr, torch),
    "builtin": functools.partial(getattr, builtins),
}


def _local_names(instruction: dis.Instruction) -> tuple[str, ...]:
    return instruction.argval if isinstance(instruction.argval, tuple) else (str(instruction.argval),)


def _module_copies(listed: Sequence[dis.Instruction], names: Mapping[str, list[str]]) -> dict[int, str]:
    """Where the module is copied into a local between its load and its use, and into which local."""
    return {
        i + 1: _local_names(listed[i + 2])[0]
        for i in range(len(listed) - 2)
        if _loads_dynamo_utils(listed[i], names)
        and (listed[i + 1].opname, listed[i + 1].arg) == ("COPY", 1)
        and listed[i + 2].opname == "STORE_FAST"
    }


def _loads_dynamo_utils(instruction: dis.Instruction, names: Mapping[str, list[str]]) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and names.get(instruction.argval) == ["module", _DYNAMO_UTILS]


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    object.__getattribute__(owner, "__dict__")[name] = value


def _key_at(values: dict[Any, Any], place: int) -> Any:
    base = collections.OrderedDict if isinstance(values, collections.OrderedDict) else dict
    return next(itertools.islice(base.keys(values), place, None))


_UTILS_SUBSTITUTE = types.SimpleNamespace(
    record_pregraph_bytecode_enter=lambda: None,
    record_pregraph_bytecode_exit=lambda context: None,
    object_setattr_ignore_descriptor=_set_attribute,
    call_size=torch.Tensor.size,
    call_stride=torch.Tensor.stride,
    call_storage_offset=torch.Tensor.storage_offset,
    dict_getitem=dict.__getitem__,
    dict_keys_getitem=_key_at,
)
"""Replaces ``torch._dynamo.utils``, which a plan does not import: what frames call of it."""


def python_frame(model: Any, functions: Functions, stubs: Sequence[Stub]) -> Function:
    """A function that calls the model in Python, with what it calls compiled.

    Args:
        model: the model.
        functions: those that it calls.
        stubs: of those that have graphs.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return functions.call(stubs, eager_callable(model), args, kwargs)

    return run


class _Calls:
    """What the code of a frame calls. The frame owns it: module globals, where the code finds it, would keep
    the model alive forever."""

    def __init__(self) -> None:
        self._calls: list[Callable[..., Any]] = []

    def add(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function for globals to hold instead of ``call``."""
        known, number = weakref.ref(self), len(self._calls)
        self._calls.append(call)

        def run(*args: Any, **kwargs: Any) -> Any:
            calls = known()
            assert calls is not None  # the frame is running
            return calls._calls[number](*args, **kwargs)

        return run


def load_frame(
    names: Mapping[str, list[str]],
    data: bytes,
    model: Any,
    graph: Function,
    functions: Functions,
    stubs: Sequence[Stub] = (),
    through: str = "",
) -> Function:
    """A function of the model's arguments that runs a frame.

    Args:
        names: see :func:`describe_frame`.
        data: likewise; its hash has been checked.
        model: the model.
        graph: calls its graph.
        functions: those between the graphs of the model.
        stubs: of those that have graphs.
        through: for a frame of :func:`inline_wrapper`, what it calls, by its name in ``CALLED``.
    """
    code, objects, resumed = marshal.loads(data)
    function, bound_args = (inline_wrapper(CALLED[through](model)), ()) if through else function_of(model)
    values, stem = function.__globals__, f"__fxpasses_{hashlib.sha256(data).hexdigest()[:12]}_{id(graph)}"
    made: dict[str, Any] = {}
    calls = _Calls()
    for number, (name, (kind, *rest)) in enumerate(names.items()):
        if kind == "graph":
            value: Any = calls.add(without_hook(graph) if stubs else graph)
        elif kind in ("resume", "handed"):
            resume_code, filled = resumed[name]
            resume_function = ResumeFunction(resume_code, values, function.__code__.co_freevars, filled)
            if kind == "handed":
                value = resume_function.function()
            else:
                known = functions.loaded(hashlib.sha256(data).hexdigest(), name, resume_function)
                value = calls.add(without_hook(known) if stubs and not resume_code.co_freevars else known)
        elif kind == "builtins":
            value = vars(builtins)
        else:
            value = _UTILS_SUBSTITUTE if rest == [_DYNAMO_UTILS] else importlib.import_module(rest[0])
        values[f"{stem}_{number}"] = value
        made[name] = f"{stem}_{number}"
    code = _with_objects(code, objects)
    code = code.replace(co_names=tuple(made.get(name, name) for name in code.co_names))
    frame = types.FunctionType(code, values, function.__name__, function.__defaults__, function.__closure__)
    frame.__kwdefaults__ = function.__kwdefaults__
    vars(frame)["calls"] = calls
    for name in made.values():
        weakref.finalize(frame, values.pop, name, None)
    if not stubs:
        return lambda *args, **kwargs: frame(*bound_args, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return functions.call(stubs, frame, (*bound_args, *args), kwargs)

    return run
