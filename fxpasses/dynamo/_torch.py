"""Private names of ``torch._dynamo`` for tracing for our backend.

Replay needs torch's descriptions of guards as plain comparisons, which exist since 2.12; see
:data:`CAN_REPLAY`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo.exc
from torch import fx
from torch._dynamo import guards
from torch._dynamo.guards import GuardManagerWrapper
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import TypeSource, is_from_source as derives_from
from torch._dynamo.types import GuardedCode, wrap_guarded_code
from torch._dynamo.utils import orig_code_map, set_example_value
from torch._dynamo.variables import base as variable_bases, builtin, lazy, object_protocol
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.nn_module import (
    UnspecializedBuiltinNNModuleVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx.experimental import proxy_tensor

from fake.seam.dispatch import (
    HigherOrderOperator,
    enable_python_dispatcher,
    function_mode_depth,
    get_dynamic_layer_stack_depth,
    is_functorch_wrapped_tensor,
)
from fake.seam.dynamo import (
    GuardBuilder,
    LazyVariableTracker,
    TensorVariable,
    builder as variable_builder,
    config,
    convert_frame,
)
from fake.seam.guards import Guard
from fake.seam.library import is_opaque_constant_type
from fake.seam.patches import LEDGER, SUPPORTED_VERSIONS, Patch, ThreadPatch, When
from fake.seam.pytree import tree_map
from fxpasses.dynamo._torch_inputs import DESCRIBES_SIZES

VariableTracker = variable_bases.VariableTracker
_CHILD = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")
_COMPARISONS: Mapping[str, Any] = getattr(guards, "GUARD_VALUE_DISPATCH", {})

_IDENTITY_COMPARE = "vt_identity_compare"
CAN_REPLAY = (
    bool(_COMPARISONS)
    and hasattr(variable_builder, "handle_traced_output")
    and hasattr(VariableTracker, "get_real_python_backed_value")
    and hasattr(object_protocol, "generic_hash_impl")
    and all(hasattr(module, _IDENTITY_COMPARE) for module in (builtin, object_protocol))
)
"""Whether this torch describes how its guards compare a value, and checks object identity in known places."""


_COMPUTED = getattr(lazy, "ComputedLazyConstantVariable", ())
"""Since torch 2.14: the result of computing with numbers and strings that nothing has looked at yet."""


def unrealized_source(variable: LazyVariableTracker) -> Any:
    """The source of a value that nothing has looked at yet. ``None`` for realized and for computed values."""
    is_computed = issubclass(type(variable), _COMPUTED)  # isinstance would realize it
    return None if variable.is_realized() or is_computed else variable.original_source()


Unsupported = torch._dynamo.exc.Unsupported
"""Dynamo's exception for a frame that it leaves in eager."""


def wrap_frame_compilations(
    around: Callable[[CodeType | None, Any, Mapping[str, Any]], AbstractContextManager[CodeType | None]],
) -> Patch:
    """Run every compilation of a frame by Dynamo inside of ``around(code, backend function, its keywords)``.

    The code is ``None`` if a frame that cannot be compiled is an error (``fullgraph=True``). If the context
    yields code, frames of that function run it from now on, and nothing is compiled.

    Dynamo's entry points call ``convert_frame._compile`` by its global name, once per frame, with the backend
    as ``compiler_fn``. Callbacks of ``torch._dynamo.callback`` are not told the backend, and
    ``torch._dynamo.reset()`` clears them.

    Returns: the ledger's patch.
    """

    def surrounded(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def compile_frame(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            code = None if given["one_graph"] else given["code"]
            with around(code, *backend_of(given["compiler_fn"])) as instead:
                if instead is not None:
                    always: Any = GuardManagerWrapper()
                    # Dynamo reads these to explain a recompile.
                    always.global_scope, always.closure_vars = {"G": given["globals"]}, {}
                    orig_code_map[instead] = given["code"]
                    return wrap_guarded_code(GuardedCode(instead, always, given["compile_id"]))
                return original(*args, **kwargs)

        return compile_frame

    def unfit() -> str:
        known = inspect.signature(convert_frame._compile).parameters
        return (
            ""
            if {"code", "globals", "compiler_fn", "one_graph", "compile_id"} <= known.keys()
            else "Dynamo compiles frames in another way than is known"
        )

    return Patch(
        convert_frame,
        "_compile",
        surrounded,
        when=When.BACKEND,
        versions=None,
        unfit=unfit,
        lost="time: Dynamo traces for the backend without fake's dispatch cache, and every repeated module anew",
    )


def backend_of(given: Any) -> tuple[Any, Mapping[str, Any]]:
    """Unwrap the backend function from ``torch.compile``'s wrappers. Returns it and its keyword arguments."""
    keywords: dict[str, Any] = {}
    while True:
        keywords = {**getattr(given, "kwargs", {}), **keywords}
        inner = getattr(given, "compiler_fn", None) or getattr(given, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(getattr(given, "__self__", None), "backend_compile_fn", None)  # DDPOptimizer
        if inner is None or inner is given:
            return given, keywords
        given = inner


def watch_tracing(
    module_called: Callable[[Callable[..., Any], Any, Any, Any, Any], Any],
    mutated: Callable[[Any, Any, bool], None],
    identified: Callable[[Any], None],
) -> AbstractContextManager[None]:
    """Intercept Dynamo's module calls and mutations in this block.

    Dynamo holds its compile lock meanwhile, so no other thread traces.

    Args:
        module_called: replaces ``UnspecializedNNModuleVariable.call_function(self, tx, args, kwargs)``, which
            is its first argument.
        mutated: called before every mutation with Dynamo's graph, the object, and whether the stored value
            may be a mutable object.
        identified: called with an object when a trace depends on its identity, for which Dynamo has no guard:
            an ``is`` comparison, a lookup by hash.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return module_called(_CALLS.torchs, self, tx, args, kwargs)

    def mutates(self: Any, item: Any) -> Any:
        mutated(self.output_graph_weakref(), item, True)
        return _MUTATIONS.torchs(self, item)

    def stores_attr(self: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        mutated(self.output_graph_weakref(), item, type(value) is not ConstantVariable)
        return _STORES.torchs(self, item, name, value, *args, **kwargs)

    def compares(left: Any, right: Any) -> Any:
        if not any(map(_is_guarded_by_value, (left, right))):
            identified(left)
            identified(right)
        return _COMPARES.torchs(left, right)

    def equals(left: Any, right: Any) -> Any:
        """Like ``compares``, for ``==``: identical values are also equal."""
        return (_COMPARES.torchs if _is_opaque_value(left) else compares)(left, right)

    def hashes(tx: Any, key: Any) -> Any:
        if not _is_guarded_by_value(key) and not _is_opaque_value(key):
            identified(key)
        return _HASHES.torchs(tx, key)

    return LEDGER.using(
        (_CALLS, call_function),
        (_MUTATIONS, mutates),
        (_STORES, stores_attr),
        (_COMPARES, equals),
        (_BUILTIN_COMPARES, compares),
        (_HASHES, hashes),
    )


_CALLS, _MUTATIONS, _STORES, _COMPARES, _BUILTIN_COMPARES, _HASHES = LEDGER.add(
    *(
        ThreadPatch(owner, name, when=When.COMPILATION, lost="time: Dynamo traces every repeated module anew")
        for owner, name in (
            (UnspecializedNNModuleVariable, "call_function"),
            (SideEffects, "mutation"),
            (SideEffects, "store_attr"),
            (object_protocol, _IDENTITY_COMPARE),
            (builtin, _IDENTITY_COMPARE),
            (object_protocol, "generic_hash_impl"),
        )
    )
)


def _is_guarded_by_value(variable: Any) -> bool:
    """Whether Dynamo guards this value: numbers, strings and enum members by value, classes and functions by
    identity, tuples by their elements.
    """
    if isinstance(variable, TupleVariable):
        return all(map(_is_guarded_by_value, variable.items))
    if hasattr(type(variable), "set_items"):
        return False  # iterating over a set depends on its order, which no plan can keep
    return isinstance(variable.get_real_python_backed_value(), _GUARDED_BY_VALUE)


def _is_opaque_value(variable: Any) -> bool:
    """Whether Dynamo guards this value by equality: DTensor placements, other types registered as values."""
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    return isinstance(variable, UserDefinedObjectVariable) and is_opaque_constant_type(type(variable.value))


_GUARDED_BY_VALUE = (
    bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip


def existed_before_trace(variable: Any) -> bool:
    """Whether a mutable object existed before the trace."""
    return type(variable.mutation_type).__name__.endswith("Existing")


def is_reached(output: Any, changed: Any, variable: Any) -> bool:
    """Whether an object can be reached from one of the mutated objects."""
    found = []
    VariableTracker.visit(lambda v: found.append(v is variable), changed, side_effects=output.side_effects)
    return any(found)


def plain_module(variable: Any) -> bool:
    """Whether Dynamo traces into this module like ordinary Python."""
    return type(variable) in (UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable)


def global_state(tx: Any) -> tuple[Any, ...] | None:
    """Everything outside of its arguments that can affect how a function is traced. None in the body of a
    higher-order operator, and while graphs are deduplicated or exported: nothing is replayed there."""
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
        function_mode_depth(),
        len(tx.symbolic_torch_function_state.mode_stack),
        get_dynamic_layer_stack_depth(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    )


def trace_counters(tx: Any) -> tuple[int, ...]:
    """Counts of what a trace made besides nodes and guards: hooks, random calls, attributes, symbols."""
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
    """Dynamo's name for a module in the ``nn_module_stack`` of nodes."""
    return _CHILD.sub(r".\2", module.get_nn_module_stack_source().name)


def has_new_attributes(tx: Any, variable: Any) -> bool:
    """Whether the traced program has set attributes on an object."""
    return bool(tx.output.side_effects.has_pending_mutation(variable))


def key_order_sources(tx: Any) -> set[Any]:
    """Sources of the dictionaries that the program iterates over: Dynamo guards their items by position."""
    return tx.output.guard_on_key_order  # type: ignore[no-any-return]


def is_from_class(source: Any, modules: Collection[Any]) -> bool:
    """Whether a source under one of these modules goes through the class of an object there."""
    while source is not None and source not in modules:
        if isinstance(source, TypeSource):
            return True
        source = getattr(source, "base", None)
    return False


def comparison_of(guard: Guard) -> Any:
    """A guard's comparison (``get_metadata_fn(guard, value)``, ``eval_fn(value, metadata)``), or None."""
    found = _COMPARISONS.get(guard.create_fn_name())
    return found if isinstance(found, guards.GuardCheckSpec) else None


def build_variable(tx: Any, source: Any, value: Any) -> Any:
    """Dynamo's variable for the value at a source. For a tensor, this creates a graph input and guards."""
    tracked = tx.output.tracked_fakes
    known = len(tracked)
    built = variable_builder.VariableBuilder(tx, source)(value)
    tracked[known:] = itertools.filterfalse(_has_no_symbols, tracked[known:])
    return built


def _has_no_symbols(tracked: Any) -> bool:
    """Whether the guard on symbolic sizes learns nothing here. It asks every tracked input for its symbols.

    The tensor's own guard compares its sizes, strides and offset. (For a wrapper subclass, the inner tensors
    are tracked as well; a DTensor's own sizes are part of its specification.)
    """
    value, context = tracked.fake, tracked.symbolic_context
    if type(context) not in DESCRIBES_SIZES or not isinstance(value, torch.Tensor):
        return False
    if any((*context.constraint_sizes, *context.constraint_strides)) or context.view_base_context is not None:
        return False
    if value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def is_specialized_or_guarded(number: torch.SymFloat) -> bool:
    """Whether anything depends on the value of a symbolic number: it is a constant by now, or in a guard."""
    node = number.node
    if not node.expr.is_Symbol:
        return True
    return any(node.expr in guard.expr.free_symbols for guard in node.shape_env.guards)


def build_number(tx: Any, source: Any, value: Any) -> fx.Node | None:
    """The node of a Python float that Dynamo keeps symbolic, or None if it is a constant of the graph."""
    variable = build_variable(tx, source, value).realize()
    return variable.as_proxy().node if isinstance(variable, SymNodeVariable) else None


def guard_mesh(tx: Any, source: Any) -> bool:
    """Guard that the device mesh at a source stays equal to the current one. Returns whether it can.

    Equal meshes are the same mesh to the code. Guarding object identity would cost a Python comparison per
    mesh.
    """
    if not hasattr(GuardBuilder, "OPAQUE_OBJ_GUARD_FN_MATCH"):
        return False
    tx.output.guards.add(source.make_guard(GuardBuilder.OPAQUE_OBJ_GUARD_FN_MATCH))
    return True


def guard_constant(tx: Any, source: Any) -> None:
    """Guard that the number at a source keeps its current value."""
    tx.output.guards.add(source.make_guard(GuardBuilder.CONSTANT_MATCH))


@contextmanager
def fake_node_runner(tx: Any) -> Iterator[Callable[[fx.Node], None]]:
    """Yields a function that runs a new node of Dynamo's graph on the fake tensors of its inputs, and stores
    the result in the node."""

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
    """Make AOTAutograd trace a graph without the mode that records the last called torch function.

    Only export's tracer reads these records, and each read of a tensor attribute under the mode calls back
    into Python. The mode also turns ``aten.size`` into its symbolic form, so a graph that calls it keeps the
    mode.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    if any(node.target in _SIZES for graph in graphs for node in graph.nodes):
        return nullcontext()

    def mode(tracer: Any) -> Any:
        return (
            nullcontext() if type(tracer) is proxy_tensor.PythonKeyTracer else _METADATA_MODE.torchs(tracer)
        )

    return LEDGER.using((_METADATA_MODE, mode))


_METADATA_MODE = LEDGER.thread_patch(
    proxy_tensor,
    "TorchFunctionMetadataMode",
    lost="time: each attribute of a tensor that AOTAutograd reads calls back into Python",
    versions=SUPPORTED_VERSIONS,
)


_SIZES = (torch.ops.aten.size, torch.ops.aten.size.default)
