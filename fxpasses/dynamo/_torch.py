"""The private names of ``torch._dynamo`` that tracing for our backend relies on. Known to fit torch 2.11 and 2.13.

Replay needs the descriptions of guards as plain comparisons that torch has had since 2.12; see :data:`CAN_REPLAY`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config, convert_frame, guards
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import TypeSource, is_from_source
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import base as variable_bases
from torch._dynamo.variables import builder as variable_builder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.nn_module import (
    UnspecializedBuiltinNNModuleVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Guard
from torch._ops import HigherOrderOperator
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import StatefulSymbolicContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

__all__ = [
    "CAN_REPLAY",
    "ConstantVariable",
    "Guard",
    "HigherOrderOperator",
    "LazyVariableTracker",
    "SymNodeVariable",
    "TensorVariable",
    "TupleVariable",
    "VariableTracker",
    "build_number",
    "build_variable",
    "comparison_of",
    "derives_from",
    "global_state",
    "guard_constant",
    "has_new_attributes",
    "is_asked_about",
    "is_from_class",
    "is_functorch_wrapped_tensor",
    "is_surrounded",
    "made_so_far",
    "plain_module",
    "read_in_order",
    "readable_path",
    "restore_compilations",
    "running_on_fakes",
    "surround_compilations",
    "tensor_variable",
    "tree_map",
    "watch_tracing",
    "without_function_metadata",
]

VariableTracker = variable_bases.VariableTracker
_ORIGINAL = "_fxpasses_original"
_CHILD = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")
_COMPARISONS: Mapping[str, Any] = getattr(guards, "GUARD_VALUE_DISPATCH", {})

CAN_REPLAY = bool(_COMPARISONS) and hasattr(variable_builder, "handle_traced_output")
"""Whether this version of torch says of its guards how a value is compared with what it was."""


def surround_compilations(around: Callable[[Any, Mapping[str, Any]], AbstractContextManager[Any]]) -> bool:
    """Have every compilation of a frame by Dynamo run inside of ``around(backend function, its keyword arguments)``.

    ``convert_frame._compile`` is what Dynamo's entry points call by its global name, once for each frame, with the
    backend as ``compiler_fn``. Callbacks of ``torch._dynamo.callback`` are not told the backend, and
    ``torch._dynamo.reset()`` forgets them.

    Returns: whether it is done; not where this version of torch has another signature.
    """
    original = convert_frame._compile
    if hasattr(original, _ORIGINAL):
        return True
    names = list(inspect.signature(original).parameters)
    if "compiler_fn" not in names:
        return False
    position = names.index("compiler_fn")

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs["compiler_fn"]
        with around(*_backend(given)):
            return original(*args, **kwargs)

    setattr(compile_frame, _ORIGINAL, original)
    convert_frame._compile = compile_frame
    return True


def is_surrounded() -> bool:
    """Whether :func:`surround_compilations` is in force."""
    return hasattr(convert_frame._compile, _ORIGINAL)


def restore_compilations() -> None:
    """Undo :func:`surround_compilations`."""
    convert_frame._compile = getattr(convert_frame._compile, _ORIGINAL, convert_frame._compile)


def _backend(given: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function behind the wrappers that ``torch.compile`` puts around a backend, and what it is called with."""
    keywords: dict[str, Any] = {}
    while True:
        keywords = {**getattr(given, "kwargs", {}), **keywords}
        inner = getattr(given, "compiler_fn", None) or getattr(given, "_torchdynamo_orig_backend", None)
        if inner is None or inner is given:
            return given, keywords
        given = inner


@contextmanager
def watch_tracing(
    module_called: Callable[[Callable[..., Any], Any, Any, Any, Any], Any],
    mutated: Callable[[Any, Any], None],
) -> Iterator[None]:
    """While this is open, Dynamo calls modules and mutates objects through us.

    Dynamo holds its compile lock meanwhile, so no other thread traces.

    Args:
        module_called: in the place of ``UnspecializedNNModuleVariable.call_function(self, tx, args, kwargs)``, which is
            given first.
        mutated: told of every mutation of an object that is older than the trace, before it is made, with Dynamo's graph.
    """
    call = UnspecializedNNModuleVariable.call_function
    mutation, store_attr = SideEffects.mutation, SideEffects.store_attr

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return module_called(call, self, tx, args, kwargs)

    def tell(effects: Any, item: Any) -> None:
        if type(item.mutation_type).__name__.endswith("Existing"):
            mutated(effects.output_graph_weakref(), item)

    def mutates(self: Any, item: Any) -> Any:
        tell(self, item)
        return mutation(self, item)

    def stores_attr(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        tell(self, item)
        return store_attr(self, item, *args, **kwargs)

    with (
        mock.patch.object(UnspecializedNNModuleVariable, "call_function", call_function),
        mock.patch.object(SideEffects, "mutation", mutates),
        mock.patch.object(SideEffects, "store_attr", stores_attr),
    ):
        yield


def plain_module(variable: Any) -> bool:
    """Whether Dynamo traces into this module as into ordinary Python."""
    return type(variable) in (UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable)


def global_state(tx: Any) -> tuple[Any, ...] | None:
    """Everything outside of its arguments that can change how a function is traced; None in the body of an operator
    that takes functions, and while graphs are deduplicated or exported, where nothing is replayed."""
    output = tx.output
    if output.current_tracer.parent is not None or output.export or config.use_graph_deduplication:
        return None
    modes = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *modes,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_function_stack(),
        len(tx.symbolic_torch_function_state.mode_stack),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    )


def made_so_far(tx: Any) -> tuple[int, ...]:
    """How much a trace has made beside nodes and guards: hooks, random numbers, attributes of the graph, sizes from data."""
    output, env = tx.output, tx.output.shape_env
    return (
        len(output.side_effects.tensor_hooks),
        len(output.side_effects.save_for_backward),
        len(output.random_calls),
        len(output.nn_modules),
        env.unbacked_symint_counter,
        env.unbacked_symfloat_counter,
        len(env.pending_fresh_unbacked_symbols),
        len(env.deferred_runtime_asserts),
    )


def readable_path(module: Any) -> str:
    """The name that Dynamo gives a module in the ``nn_module_stack`` of nodes."""
    return _CHILD.sub(r".\2", module.get_nn_module_stack_source().name)


def has_new_attributes(tx: Any, variable: Any) -> bool:
    """Whether the traced program has set attributes of an object."""
    return bool(tx.output.side_effects.has_pending_mutation(variable))


def read_in_order(tx: Any) -> set[Any]:
    """Sources of the dictionaries that the program goes through in their order: Dynamo guards their items by place."""
    return tx.output.guard_on_key_order  # type: ignore[no-any-return]


def derives_from(source: Any, base: Any) -> bool:
    """Whether what is at a source is reached through another one."""
    return is_from_source(source, base)


def is_from_class(source: Any, modules: Collection[Any]) -> bool:
    """Whether a source under one of these modules goes through the class of an object there."""
    while source is not None and source not in modules:
        if isinstance(source, TypeSource):
            return True
        source = getattr(source, "base", None)
    return False


def comparison_of(guard: Guard) -> Any:
    """How a value is compared for a guard (``get_metadata_fn(guard, value)``, ``eval_fn(value, metadata)``), or None."""
    found = _COMPARISONS.get(guard.create_fn_name())
    return found if isinstance(found, guards.GuardCheckSpec) else None


def build_variable(tx: Any, source: Any, value: Any) -> Any:
    """What Dynamo makes of the value at a source: a graph input for a tensor, and guards."""
    tracked = tx.output.tracked_fakes
    known = len(tracked)
    built = variable_builder.VariableBuilder(tx, source)(value)
    tracked[known:] = itertools.filterfalse(_says_nothing_of_symbols, tracked[known:])
    return built


def _says_nothing_of_symbols(tracked: Any) -> bool:
    """Whether the guard on symbolic sizes, which asks every tracked input where its symbols come from, learns nothing here.

    The numbers of such a tensor are compared by its own guard.
    """
    value, context = tracked.fake, tracked.symbolic_context
    if type(context) is not StatefulSymbolicContext or not isinstance(value, torch.Tensor):
        return False
    if any((*context.constraint_sizes, *context.constraint_strides)) or context.view_base_context is not None:
        return False
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def is_asked_about(number: torch.SymFloat) -> bool:
    """Whether something depends on the value of a symbolic number: it is a constant by now, or in a guard."""
    node = number.node
    if not node.expr.is_Symbol:
        return True
    return any(node.expr in guard.expr.free_symbols for guard in node.shape_env.guards)


def build_number(tx: Any, source: Any, value: Any) -> fx.Node | None:
    """The node of a Python float that Dynamo keeps symbolic; None where it is a constant of the graph."""
    variable = build_variable(tx, source, value).realize()
    return variable.as_proxy().node if isinstance(variable, SymNodeVariable) else None


def guard_constant(tx: Any, source: Any) -> None:
    """Have the graph used only while there is the number at a source that is there now."""
    tx.output.guards.add(source.make_guard(guards.GuardBuilder.CONSTANT_MATCH))


@contextmanager
def running_on_fakes(tx: Any) -> Iterator[Callable[[fx.Node], None]]:
    """Gives a function that runs a new node of Dynamo's graph on the fake tensors of its inputs, and remembers the result in
    it."""

    def run(node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target is not operator.setitem:
            set_example_value(node, value)

    with tx.fake_mode, enable_python_dispatcher():
        yield run


def tensor_variable(tx: Any, node: fx.Node) -> Any:
    """Dynamo's variable for a node that is a tensor."""
    proxy = fx.Proxy(node, tx.output.current_tracer)
    value = node.meta["example_value"]
    return variable_builder.handle_traced_output(value, tx, proxy, {}, None, TensorVariable)


def without_function_metadata(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Have AOTAutograd trace a graph without the mode that notes which function of torch was called last.

    Only export's tracer reads these notes, and each attribute of a tensor that is read while the mode is on calls
    back into Python. The mode also turns ``aten.size`` into its symbolic form: a graph that calls it needs the mode.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    if any(node.target in _SIZES for graph in graphs for node in graph.nodes):
        return nullcontext()
    original, thread = proxy_tensor.TorchFunctionMetadataMode, threading.get_ident()

    def mode(tracer: Any) -> Any:
        unread = type(tracer) is proxy_tensor.PythonKeyTracer and threading.get_ident() == thread
        return nullcontext() if unread else original(tracer)

    return mock.patch.object(proxy_tensor, "TorchFunctionMetadataMode", mode)


_SIZES = (torch.ops.aten.size, torch.ops.aten.size.default)
