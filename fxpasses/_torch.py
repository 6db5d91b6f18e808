"""Private torch names that several folders of ``fxpasses`` use: the entry points of AOTAutograd and Inductor.

Names that one folder alone uses are in its own ``_torch*.py``, and names that ``fake`` or
``compiled_autograd`` use, too, in ``fake/seam``. No other module imports from ``torch._*``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._functorch.aot_autograd import (
    SerializableAOTDispatchCompiler,
    aot_module_simplified,
    make_boxed_func,
)
from torch._guards import CompileContext
from torch._inductor import list_mode_options as inductor_mode_options
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.compile_fx import (
    compile_fx_backward,
    compile_fx_forward,
    compile_fx_inner,
    create_compiler_config_extra,
    fw_compiler_freezing,
    get_cpp_wrapper_config,
    get_num_model_outputs,
    partition_fn as inductor_partition_fn,
    run_pre_grad_passes,
    select_decomp_table,
)
from torch._inductor.compiler_bisector import CompilerBisector
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_symbols

from fake.seam.aot_autograd import config as functorch_config
from fake.seam.dispatch import (
    DisableAutocast,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    decomposition_table,
    disable_current_modes,
    enable_python_dispatcher,
    has_kernel,
    without_function_modes,
)
from fake.seam.dynamo import (
    DynamoError,
    TensorifyScalarRestartAnalysis,
    config as dynamo_config,
    counters as dynamo_counters,
    reset_code as _reset_code,
)
from fake.seam.fake_tensor import FakeTensor, FakeTensorMode
from fake.seam.fx import detect_fake_mode, has_effects
from fake.seam.guards import TracingContext, tracing
from fake.seam.inductor import (
    CustomGraphPass,
    CustomPartitionerFn,
    OutputCode,
    config as inductor_config,
    get_custom_graph_passes,
)
from fake.seam.patches import LEDGER

_AOT_PARAMETERS = inspect.signature(aot_module_simplified).parameters


def is_control_flow(error: BaseException) -> bool:
    """Whether torch raised ``error`` to restart its own tracing. Such errors must propagate unwrapped."""
    return isinstance(error, TensorifyScalarRestartAnalysis)


def unwrapped(error: Exception, frame: FrameType | None) -> Exception:
    """Convert an error to one that Dynamo re-raises as it is, not wrapped in ``BackendCompilerFailed``.

    Args:
        error: an error about what the user wrote.
        frame: the first frame to show in its traceback.
    """
    kind = type(error)
    text = str(error)  # drops what Dynamo appends: instructions for reporting a Dynamo bug
    made: Any = type(
        kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__, "__str__": lambda self: text}
    )
    same = made.__new__(made)
    ShortenTraceback.__init__(same, *error.args, first_useful_frame=frame)
    same.__dict__ |= error.__dict__
    return same


_names = itertools.count()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function's code object a unique name, and return the function.

    Dynamo records by file, line and name which sizes it compiled for, and makes sizes that change symbolic.
    If a wrapper were re-created for each program under one name, the second program's sizes would become
    symbolic.
    """
    function.__code__ = function.__code__.replace(co_name=f"call_{next(_names)}")
    return function


def reset_code(function: Callable[..., Any]) -> None:
    """Discard everything that Dynamo compiled for ``function``'s own code object."""
    _reset_code(function.__code__)


@contextlib.contextmanager
def compile_context(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Enter the contexts that ``torch._inductor.compile_fx`` sets up around AOTAutograd.

    These are a fake mode for Inductor's lowering, a tracing context, and AOTAutograd's settings for graphs
    that Inductor will compile.
    """
    fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get() or TracingContext(fake_mode)
    settings: dict[str, Any] = {"unlift_effect_tokens": True}
    wrappers = contextlib.ExitStack()
    if wrapper_arguments():
        wrappers.enter_context(inductor_config.patch(get_cpp_wrapper_config()))
        wrappers.enter_context(V.set_real_inputs(example_inputs))
    if hasattr(inductor_config, "selective_decompose"):
        settings["selective_decompose"] = inductor_config.selective_decompose
    with (
        wrappers,
        enable_python_dispatcher(),
        V.set_fake_mode(fake_mode),
        tracing(context),
        functorch_config.patch(settings),
    ):
        yield


def wrapper_arguments() -> dict[str, Any]:
    """Arguments that tell Inductor's inner compiler which wrapper (C++, FX) its settings ask for."""
    asked = {name: bool(getattr(inductor_config, name, False)) for name in ("cpp_wrapper", "fx_wrapper")}
    return asked if any(asked.values()) else {}


def freezes_parameters() -> bool:
    """Whether Inductor's settings ask to turn the parameters of an inference graph into constants."""
    return bool(inductor_config.freezing) and not torch.is_grad_enabled()


def compile_frozen(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    dynamo_graph: fx.GraphModule,
    num_example_inputs: int,
    inner_compile: Callable[..., Any],
    extra: Any,
) -> Callable[..., Any]:
    """Compile an inference graph with its parameters as constants (``torch._inductor.config.freezing``)."""
    whole = "compiler_config_extra" in inspect.signature(fw_compiler_freezing).parameters  # not before 2.14
    shared = (extra,) if whole else (extra.cudagraphs, extra.graph_id, extra.forward_device)
    compile_: Any = fw_compiler_freezing
    return compile_(gm, inputs, dynamo_graph, num_example_inputs, inner_compile, *shared)


def new_compiler_extra(gm: fx.GraphModule) -> Any:
    """Create the Inductor state that one graph's forward and backward share (CUDA graphs, graph id)."""
    takes_graph = "gm" in inspect.signature(create_compiler_config_extra).parameters
    return create_compiler_config_extra(gm if takes_graph else inductor_config)  # type: ignore[arg-type]


def aot_extra_arguments(extra: Any) -> dict[str, Any]:
    """Arguments of ``aot_module_simplified`` whose names differ between torch versions.

    Before 2.13, AOTAutograd does not take Inductor's passes on the Dynamo graph, and they do not run.
    """
    if "compiler_config_extra" in _AOT_PARAMETERS:
        return {"compiler_config_extra": extra, "pre_grad_passes": run_pre_grad_passes}
    return {"cudagraphs": extra.cudagraphs, "boxed_forward_device_index": extra.forward_device}


def serializable(compiler: Callable[..., Any]) -> Any:
    """Mark ``compiler`` as one whose results may be stored in AOTAutograd's cache."""
    return SerializableAOTDispatchCompiler(OutputCode, compiler)


def overloads(operator: Any) -> list[OpOverload]:
    """The overloads that an operator stands for: the operator itself, or every overload of a packet."""
    if isinstance(operator, OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator is ``CompositeImplicitAutograd``: no AOTAutograd graph contains such operators."""
    return has_kernel(operator.name(), "CompositeImplicitAutograd")


def shape_env_of(values: Sequence[Any]) -> Any:
    """The shape environment of the first symbolic integer among ``values`` and their sizes, or ``None``."""
    for value in values:
        for size in (value, *value.shape) if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


@contextlib.contextmanager
def data_dependent_sizes(values: Sequence[Any]) -> Iterator[None]:
    """Trace operators whose output sizes depend on data with new symbols, as ``fullgraph=True`` does.

    In a *forward* pass, Dynamo leaves such operators to eager by breaking the graph. The gradient of ``v`` in
    ``x[mask] = v`` appears too late for a graph break.

    Args:
        values: the graph's inputs. Without a fake tensor that has a shape environment, nothing changes.
    """
    mode = detect_fake_mode(values)
    shape_env = None if mode is None else mode.shape_env
    if shape_env is None:
        yield
        return
    before = shape_env.settings
    shape_env.settings = dataclasses.replace(before, allow_dynamic_output_shape_ops=True)
    try:
        yield
    finally:
        shape_env.settings = before


_WAITED_FOR = LEDGER.thread_patch(
    AsyncCollectiveTensor,
    "trigger_wait",
    lost="gradients of results of collectives that are inputs of a compiled function (a layer behind a sequence-parallel embedding)",
)


def gradients_of_results() -> contextlib.AbstractContextManager[None]:
    """Make the tensor that AOTAutograd traces for a collective's result require gradients if the result does.

    Without this, torch silently drops such gradients (2.13 to 2.15): autograd tracks the result, not the
    tensor that it wraps.
    """

    def waited_for(result: AsyncCollectiveTensor) -> torch.Tensor:
        tensor: torch.Tensor = _WAITED_FOR.torchs(result)
        if not result.requires_grad or tensor.requires_grad:
            return tensor
        with torch.enable_grad():
            return tensor.detach().requires_grad_().clone()  # not a leaf, as the result is not one

    return LEDGER.using((_WAITED_FOR, waited_for))


def filter_lowerings(allowed: Callable[[str], bool]) -> contextlib.AbstractContextManager[None]:
    """Have Inductor call the operators of nodes that are not ``allowed`` instead of lowering them.

    Args:
        allowed: called once for each call in the graph, in order, with the call as text.
    """

    def disabled(backend: str, subsystem: str, debug_info: Callable[[], str] | None = None) -> bool:
        if (backend, subsystem) != ("inductor", "lowerings"):
            return False
        return not allowed(debug_info() if debug_info is not None else "")

    return LEDGER.using((_LOWERINGS, disabled))


_LOWERINGS = LEDGER.thread_patch(
    CompilerBisector, "disable_subsystem", lost="bisection of Inductor's lowerings"
)


def lowering_of(target: Any) -> Callable[..., Any] | None:
    """The function that is registered with Inductor to lower an operator, or ``None``."""
    from torch._inductor.lowering import lowerings

    found = lowerings.get(target)
    return None if found is None else inspect.unwrap(found)


def decompositions_of(target: OpOverload) -> dict[Any, Any] | None:
    """Torch's decomposition of an operator plus the core decompositions, or ``None`` if it has none."""
    if target not in decomposition_table:
        return None
    return {**_core_decompositions(), target: decomposition_table[target]}


@functools.cache
def _core_decompositions() -> dict[Any, Any]:
    return dict(core_aten_decompositions())


def trace_calls(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: dict[Any, Any],
    guards: bool,
    functional: bool = False,
    as_captured: bool = False,
) -> fx.GraphModule:
    """Trace what ``function`` calls on fake inputs, whatever modes, gradients or autocast surround it.

    Args:
        function: takes tensors and returns a tuple.
        inputs: the fake tensors.
        decompositions: for operators that must not appear in the graph.
        guards: whether decisions of the function that depend on symbolic sizes are recorded as guards.
        functional: whether mutations of tensors that the function created become functional calls, as in
            graphs that AOTAutograd captures.
        as_captured: whether operators are decomposed as in such graphs: ``dropout`` becomes
            ``native_dropout``, not calls of ``bernoulli``.

    Returns:
        The graph.

    Raises:
        Exception: whatever the function raises.
    """
    function = dispatch_functionalize(function) if functional else function
    with disable_current_modes(), torch.no_grad(), DisableAutocast(), tracing(None):
        mode = detect_fake_mode(inputs)
        with contextlib.ExitStack() as stack:
            if as_captured:
                stack.enter_context(enable_python_dispatcher())
            if mode is not None:
                stack.enter_context(mode)
                if mode.shape_env is not None and not guards:
                    stack.enter_context(mode.shape_env.suppress_guards())
            return make_fx(function, decomposition_table=decompositions, tracing_mode="real")(*inputs)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Leave the modes of a compilation: tensors are real, no mode sees calls, a new fake mode may be made."""
    with disable_current_modes(), without_function_modes(), tracing(None):
        yield


def compile_threads() -> int:
    """Number of kernels that Inductor compiles in parallel."""
    return get_compile_threads()


def cpp_compiler() -> tuple[str, str]:
    """The C++ compiler that Inductor uses or ``""``, and the reason if there is none."""
    try:
        return get_cpp_compiler(), ""
    except RuntimeError as error:  # InvalidCxxCompiler
        return "", str(error)


def compile_cache_directory() -> str:
    """The directory where Inductor stores compiled code."""
    return cache_dir()


def compile_caches() -> dict[str, bool]:
    """Which on-disk caches of compiled graphs torch's settings leave enabled."""
    wanted = not inductor_config.force_disable_caches
    return {
        "Inductor's": wanted and bool(inductor_config.fx_graph_cache),
        "AOTAutograd's": wanted and bool(functorch_config.enable_autograd_cache),
    }


@contextlib.contextmanager
def segment_context() -> Iterator[list[Any]]:
    """Compile a segment of a graph. Yields the list that Inductor fills with the strides of its outputs.

    AOTAutograd names the inputs that a backward graph may overwrite by their positions in the whole graph, so
    a segment gets none.
    """
    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    donated = getattr(metadata, "bw_donated_idxs", None)
    try:
        if metadata is not None:
            metadata.bw_donated_idxs = []
        with TracingContext.report_output_strides() as strides:
            yield strides if strides is not None else []
    finally:
        if metadata is not None:
            metadata.bw_donated_idxs = donated
