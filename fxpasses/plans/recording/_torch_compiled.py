"""Private torch names for making plans: what Dynamo, AOTAutograd and Inductor leave after a compilation."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import (
    ChainedSource,
    ConstDictKeySource,
    DictGetItemSource,
    DictSubclassGetItemSource,
    OptimizerSource,
)
from torch._dynamo.variables import ConstantVariable, SetVariable
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.select_algorithm import extern_kernels

from fake.seam.aot_autograd import config as _functorch_config
from fake.seam.dynamo import InstructionTranslator, config as _dynamo_config
from fake.seam.guards import TracingContext
from fake.seam.patches import LEDGER, Edit, Patch, When
from fake.seam.symbolic_shapes import (
    AttrSource,
    GetItemSource,
    LocalSource,
    PythonPrinter,
    TensorPropertySource,
    concrete_bounds,
)
from fake.symbols.terms import text_of_source
from fxpasses._torch import get_cpp_compiler
from fxpasses.plans import _torch
from fxpasses.plans._torch import TRUSTED_MODULES, OpOverload
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks._torch_entry import INLINE
from fxpasses.plans.objects.hooks_of_modules import HOOKS_OF_CALLS
from fxpasses.plans.recording._torch_constants import MARKED, constant_result_calls as constant_result_calls

_MAX_CONSTANT_NUMEL = 1 << 20
"""The most elements of a constant that a plan can contain."""


def why_not_plain(compiled: CompiledFxGraph) -> str:
    """Why a compiled graph is more than its generated code, or ""."""
    constants = dict(compiled.constants or {}).values()
    if any(type(value) is not torch.Tensor or value.numel() > _MAX_CONSTANT_NUMEL for value in constants):
        return "large constants in a compiled graph"
    if compiled.frozen_param_names:
        return "parameters that are constants"
    if set(compiled.device_types) - {"cpu"}:
        return "a tensor that is not on the CPU"
    if compiled.inputs_to_check or compiled.cudagraph_info is not None:
        return "a graph whose inputs are checked or recorded"
    return "" if compiled.source_code and compiled.current_callable is not None else "a graph without source"


def kernel_compiler() -> str:
    """The compiler that Inductor uses for kernels."""
    return str(get_cpp_compiler())


def traced_codes() -> list[types.CodeType]:
    """The code of all functions that Dynamo traced for the current graph.

    That includes functions that raised or that a graph break left.
    """
    context = TracingContext.get()
    return list(dict.fromkeys((*context.traced_code, *context.inlined_code_cache)))


def foreign_operators() -> list[OpOverload]:
    """The operators outside torch in the graph that Dynamo is making.

    Raises:
        NoPlan: it has a function whose code Dynamo did not trace, or a higher-order operator.
    """
    found, known = [], (*TRUSTED_MODULES, *_OWN_PACKAGES)
    for target in _called_targets():
        found += _torch.foreign_operators(target)
        if isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in known:
            raise NoPlan("a function of another library in the graph", str(target))
    return found


def _called_targets() -> Iterator[Any]:
    """What the graph that Dynamo is making calls."""
    output = InstructionTranslator.current_tx().output
    inner = [module.graph for module in output.nn_modules.values() if isinstance(module, fx.GraphModule)]
    for node in itertools.chain(*(graph.nodes for graph in (output.graph, *inner))):
        if node.op == "call_function":
            yield node.target


def codes_in_graph() -> list[types.CodeType]:
    """The code of Python functions in Dynamo's graph. They run while it is traced into operators."""
    codes: dict[types.CodeType, None] = {}
    for target in _called_targets():
        while isinstance(target, types.FunctionType):
            codes[target.__code__] = None
            target = vars(target).get("__wrapped__")
    return list(codes)


_OWN_PACKAGES = ("fxpasses", "fake", "compiled_autograd")


def guarded_sources(numbers: Collection[str]) -> list[str]:
    """What Dynamo relies on among the arguments and globals of the frame that it is tracing.

    Args:
        numbers: places where it relies only on there being an integer.
    """
    places = [
        (text_of_source(guard.originating_source), guard.create_fn_name())
        for guard in InstructionTranslator.current_tx().output.guards
    ]
    return [place for place, asks in places if asks != "TYPE_MATCH" or place not in numbers]


def symbolic_attributes() -> dict[str, tuple[Any, str]]:
    """The symbolic integers in the frame that Dynamo is tracing: by guard name, object and attribute."""
    output, found = InstructionTranslator.current_tx().output, {}
    for tracked in output.tracked_fakes:
        if isinstance(tracked.fake, torch.SymInt) and isinstance(tracked.source, AttrSource):
            owner = _value_of(tracked.source.base, output)
            if tracked.source.member in getattr(owner, "__dict__", {}):
                found[text_of_source(tracked.source)] = owner, tracked.source.member
    return found


def _value_of(source: Any, output: OutputGraph) -> Any:
    """The value of a local of the frame, or of attributes and entries of objects there, else None."""
    if type(source) is LocalSource:
        return output.local_scope.get(source.local_name)
    if not isinstance(source, ChainedSource):
        return None
    base = _value_of(source.base, output)
    if isinstance(source, AttrSource):
        return getattr(base, "__dict__", {}).get(source.member)
    if isinstance(source, (GetItemSource, DictGetItemSource, DictSubclassGetItemSource)):
        key = source.index
        if isinstance(base, dict):  # a subclass may override the methods
            if isinstance(key, ConstDictKeySource):
                key = next(itertools.islice(dict.keys(base), key.index, None), None)
            return dict.get(base, key) if type(key) in (int, str) else None
        held = type(base) in (tuple, list) and type(key) is int and 0 <= key < len(base)
        return base[key] if held else None
    return base if text_of_source(source) == text_of_source(source.base) else None


def tensors_of_frame() -> dict[str, torch.Tensor]:
    """By guard name, the tensors that the frame which Dynamo is tracing was given."""
    output = InstructionTranslator.current_tx().output
    found = {text_of_source(t.source): _value_of(t.source, output) for t in output.tracked_fakes}
    return {text: value for text, value in found.items() if isinstance(value, torch.Tensor)}


def shape_env_of_frame() -> Any:
    """The shape environment of the frame that Dynamo is tracing."""
    return InstructionTranslator.current_tx().output.shape_env


def reads_gradients() -> bool:
    """Whether the frame that Dynamo is tracing depends on gradients of tensors that it was given."""
    return any(
        text_of_source(guard.originating_source).endswith(".grad")
        and not guard.create_fn_name().endswith(("CLOSURE_MATCH", "FUNCTION_MATCH"))  # torch.func.grad
        for guard in InstructionTranslator.current_tx().output.guards
    )


def tensor_source(place: str) -> str:
    """The tensor whose base or shard a guard's ``place`` is, or the place itself, as guards name it."""
    return place.removesuffix("._base").removesuffix("._local_tensor")


def has_hooks(model: Any) -> bool:
    """Whether a call of a model runs hooks around ``forward``, of which Dynamo traces only ``forward``.

    For torch's own modules, Dynamo traces the hooks too.
    """
    return isinstance(model, torch.nn.Module) and any(getattr(model, name) for name in HOOKS_OF_CALLS)


def is_tracing_call_of(model: Any) -> bool:
    """Whether Dynamo is tracing a model's call, and not a function inside of one that it left to Python."""
    if has_hooks(model):
        return root_code() is INLINE
    called = model.forward if isinstance(model, torch.nn.Module) else model
    for function in (called, called.__call__):  # type: ignore[operator]
        if getattr(getattr(function, "__func__", function), "__code__", None) is root_code():
            return True
    return root_code() is INLINE


def inlined_callable() -> Any:
    """What the frame that Dynamo is tracing calls, if it does nothing else."""
    return InstructionTranslator.current_tx().output.local_scope.get("fn") if root_code() is INLINE else None


def root_code() -> types.CodeType:
    """The code of the frame that Dynamo is tracing."""
    code: types.CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


@contextlib.contextmanager
def recorded_compilation() -> Iterator[None]:
    """A context in which plans can be recorded.

    AOTAutograd compiles even what its cache has, since a plan is made of what is compiled. Dynamo guards on
    hooks of modules, so that compiled code notices a hook that is added later too.
    """
    with (
        _functorch_config.patch(enable_autograd_cache=False),
        _dynamo_config.patch(skip_nnmodule_hook_guards=False),
        LEDGER.in_force(_ITEMS, _TRACE_ENDS, MARKED),
    ):
        yield


class _WatchedItems:
    """The items of a set that Dynamo traces. Records reads of more than membership."""

    def __init__(self) -> None:
        self.order_reads: list[Any] = []

    def __get__(self, variable: Any, owner: Any = None) -> Any:
        if variable is None:
            return self
        items = vars(variable)["items"]
        if len(items) > 1:
            caller = sys._getframe(1)
            method = caller.f_code.co_name
            reader = caller.f_locals["name"] if method == "call_method" else method
            if reader not in _ORDER_FREE_METHODS and not _is_identity_comparison(caller):
                self.order_reads.append(items)
        return items

    def __set__(self, variable: Any, items: Any) -> None:
        vars(variable)["items"] = items


def _is_identity_comparison(frame: types.FrameType | None) -> bool:
    """Whether the set is read for ``is``, such as ``memo is None`` in ``Module.named_modules``."""
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == "vt_identity_compare":
            return True
        frame = frame.f_back
    return False


_ORDER_FREE_METHODS = ("__contains__", "__init__", "debug_repr", "add", "discard", "remove", "clear")
_watched_items = _WatchedItems()
_SETS = getattr(sys.modules[SetVariable.__module__], "BaseSetVariable", SetVariable)  # the first from 2.14 on


def _watch_items() -> Callable[[], None]:
    _watched_items.order_reads.clear()
    _SETS.items = _watched_items

    def undo() -> None:
        del _SETS.items  # type: ignore[misc]
        _watched_items.order_reads.clear()

    return undo


(_ITEMS,) = LEDGER.add(
    Edit(
        what="torch._dynamo.variables.sets.SetVariable.items",
        do=_watch_items,
        when=When.COMPILATION,
        versions=None,
        lost="plans of functions that go over sets would be used in processes in which sets have another order",
    )
)


def depends_on_set_order() -> bool:
    """Whether a frame traced since recording began depends on the order of a set that differs by process."""
    return any(not all(map(_is_number, items)) for items in _watched_items.order_reads)


def _is_number(item: Any) -> bool:
    return isinstance(item.vt, ConstantVariable) and type(item.vt.value) in (bool, int, float, complex)


@contextlib.contextmanager
def compiled_frames(
    on_traced: Callable[[], None], on_compiled: Callable[[types.CodeType, types.CodeType], None]
) -> Iterator[None]:
    """Watch the frames that Dynamo compiles.

    Args:
        on_traced: called when a trace has ended and its graph, if there is one, is compiled.
        on_compiled: called next, with the code of the frame and the code that Dynamo wrote for it.
    """

    def hook(code: types.CodeType, new_code: types.CodeType) -> None:
        on_compiled(code, new_code)

    handle = register_bytecode_hook(hook)
    _trace_end_callbacks.append(on_traced)
    try:
        yield
    finally:
        _trace_end_callbacks.remove(on_traced)
        handle.remove()


_trace_end_callbacks: list[Callable[[], None]] = []


def _notifying_trace_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_subgraph(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for callback in tuple(_trace_end_callbacks):
            callback()
        return result

    return compile_subgraph


(_TRACE_ENDS,) = LEDGER.add(
    Patch(
        OutputGraph,
        "compile_subgraph",
        _notifying_trace_end,
        when=When.COMPILATION,
        versions=None,
        lost="calls whose first frame ends before it has a graph would have no plans",
    )
)


_ALLOWED_OPCODES = frozenset({
    "RESUME", "NOP", "POP_TOP", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST",
    "STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST", "DELETE_FAST", "LOAD_CONST", "LOAD_ATTR", "LOAD_METHOD", "BINARY_SUBSCR", "COPY",
    "SWAP", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "LIST_EXTEND",
    "UNPACK_SEQUENCE", "TO_BOOL", "RETURN_VALUE", "RETURN_CONST", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE",
    "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE",
    "JUMP_FORWARD", "JUMP_BACKWARD", "GET_ITER", "FOR_ITER", "END_FOR", "POP_ITER", "IS_OP", "CACHE", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS",
})  # fmt: skip
_PROFILING = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
_NUMBERS = ("call_size", "call_stride", "call_storage_offset", "_as_tensor_fullprec")
"""What is called to pass sizes and floats to a graph."""


_MODULES = ("__import_", "___module_")
"""Prefixes of the names that Dynamo gives to modules among a frame's globals."""
_MAKING = ("__new__", "object_setattr_ignore_descriptor", "clear", "update", "items", "__setitem__")
"""What is called to create and fill objects that are returned, and the dictionary of ``**kwargs``."""


def why_more_than_graph(code: types.CodeType) -> str:
    """Why Dynamo's code does more than call one graph and assemble its results, or "".

    Objects among the results are made by ``__new__`` or by constructors of tuples.
    :func:`~fxpasses.plans.recording._torch_effects.changed_objects` checks that no older object is changed.
    """
    calls = expected = graphs = 0
    every = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "COPY")]
    pairs = itertools.pairwise(every)
    kept = {b.argval for a, b in pairs if b.opname == "STORE_FAST" and a.argval in (*_MAKING, *_NUMBERS)}
    instructions = [i for i in every if i.opname != "STORE_FAST"]
    for position, instruction in enumerate(instructions):
        name, value = instruction.opname, instruction.argval
        if name not in _ALLOWED_OPCODES:
            return f"the frame does more than its graph: {name}"
        calls += name == "CALL"
        expected += name in ("LOAD_ATTR", "LOAD_METHOD") and value in (*_PROFILING, *_NUMBERS, *_MAKING)
        expected += (name == "LOAD_CONST" and _makes_tuples(value)) or (name == "LOAD_FAST" and value in kept)
        if name == "LOAD_METHOD" and value not in (*_PROFILING, *_MAKING):
            return f"the frame calls a method: {value}"
        if name == "LOAD_GLOBAL":
            if str(value).startswith("__compiled_fn"):
                graphs += 1
            elif value == "type" or (path := _path(instructions, position))[1:] == ["OrderedDict"]:
                expected += 1
            elif str(value).startswith("__") and not value.startswith(_MODULES) and path[-1] != "__new__":
                return f"the frame reads a global: {value}"
    if graphs != 1:
        return "the frame has no graph, or several"
    return "" if calls == expected + 1 else "the frame calls functions"


def _path(instructions: list[dis.Instruction], position: int) -> list[str]:
    """The name of a loaded global, and the chain of attributes that are read from it."""
    end = position + 1
    while instructions[end].opname == "LOAD_ATTR":
        end += 1
    return [str(instruction.argval) for instruction in instructions[position:end]]


def _makes_tuples(value: Any) -> bool:
    """Whether a constant is a class of tuples, or its ``_make``."""
    owner = getattr(value, "__self__", None) if getattr(value, "__name__", "") == "_make" else value
    return isinstance(owner, type) and issubclass(owner, tuple)


def _option(source: Any, number: Any) -> list[Any] | None:
    """The optimizer option that an input is, if nothing guards on its value."""
    group: Any = getattr(source, "base", None)
    groups = getattr(group, "base", None)
    if getattr(groups, "member", "") != "param_groups" or not isinstance(
        getattr(groups, "base", None), OptimizerSource
    ):
        return None
    return ["option", group.index, source.index] if is_unguarded(number) else None


def symbolic_float_arguments(graph: fx.Graph) -> dict[str, Any]:
    """By name, the symbolic floats that are arguments themselves and that Dynamo's graph takes as tensors."""
    args = [node.meta["grapharg"] for node in graph.find_nodes(op="placeholder") if "grapharg" in node.meta]
    found = {
        arg.source.local_name: arg
        for arg in args
        if arg.pass_arg_as_tensor and type(arg.source) is LocalSource
    }
    return {name: getattr(arg.fake_tensor, "item_memo", None) for name, arg in found.items()}


def _argument(source: Any, number: Any) -> list[Any] | None:
    """The argument that a float is, if nothing guards on its value."""
    return ["float", source.local_name] if type(source) is LocalSource and is_unguarded(number) else None


def is_unguarded(number: Any) -> bool:
    """Whether nothing guards on the value of a symbolic float."""
    if not isinstance(number, torch.SymFloat) or not isinstance(number.node.expr, sympy.Symbol):
        return False
    symbol, shape_env = number.node.expr, number.node.shape_env
    is_guarded = any(symbol in guard.expr.free_symbols for guard in shape_env.guards)
    return not is_guarded and concrete_bounds(shape_env, symbol) == (None, None)


def input_names_and_numbers(graph: fx.Graph, lifted: int) -> tuple[list[str], list[list[Any] | None]]:
    """The inputs of the compiled form of Dynamo's graph: their guard names, and for numbers which number of
    which input they are.

    A float that Dynamo passes as a tensor, as with ``dynamic=True``, is ``["constant"]``: its value is part
    of the key, wherever it comes from. Exceptions hold for all values: ``["option", group, name]`` is an
    option of an optimizer, ``["float", name]`` an argument. An integer that is no size is ``["attribute",
    where]``.

    Args:
        graph: Dynamo's.
        lifted: how many tensor attributes of the graph come first.
    """
    if any("grapharg" not in node.meta for node in graph.find_nodes(op="placeholder")):
        raise NoPlan("a graph in which Dynamo has made constants of weights")
    sources = [node.meta["grapharg"].source for node in graph.nodes if node.op == "placeholder"]
    names = ["" for _ in range(lifted)] + [text_of_source(source) for source in sources]
    numbers: list[list[Any] | None] = [None for _ in range(lifted)]
    for source, node in zip(sources, (n for n in graph.nodes if n.op == "placeholder"), strict=True):
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor):
            number = getattr(example, "item_memo", None)
            wraps = node.meta["grapharg"].pass_arg_as_tensor and number is not None
            numbers.append(
                (_option(source, number) or _argument(source, number) or ["constant"]) if wraps else None
            )
        elif isinstance(source, TensorPropertySource) and text_of_source(source.base) in names:
            place = names.index(text_of_source(source.base))
            numbers.append([source.prop.method_name(), place, source.idx])
        else:
            is_number = isinstance(example, (torch.SymInt, int))
            numbers.append(["attribute", text_of_source(source)] if is_number else None)
    return names, numbers
