"""Private names of torch for capturing a backward pass, and all differences between torch versions.

Names that ``fake`` uses, too, are in ``fake/seam``. Torch does not document the protocol of the engine hook. It is taken from
``torch/csrc/dynamo/python_compiled_autograd.cpp`` and ``torch/_dynamo/compiled_autograd.py`` (2.11 to 2.13).
"""

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd as torch_compiled_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._functorch._aot_autograd.runtime_wrappers import (
    AOTDispatchAutograd,
    AutogradLazyBackwardCompileInfo,
    CachedAutogradLazyBackwardCompileInfo,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch.utils._traceback import CapturedTraceback

from fake.seam.autograd_engine import (
    current_autograd_node,
    function_of,
    keeps_graph_in_engine as keeps_graph,
    top_saved_tensors_hooks,
)
from fake.seam.dispatch import (
    DisableAutocast as autocast_disabled,
    HigherOrderOperator,
    TorchDispatchMode,
    TorchDispatchModeKey,
    disable_current_modes as _disable_current_modes,
    dispatch_mode_depth,
    get_dispatch_mode,
    has_storage,
    is_any_autocast_enabled as autocast_enabled,
)
from fake.seam.dynamo import TensorVariable, config as dynamo_config, get_metrics_context, registry
from fake.seam.fake_tensor import unset_fake_temporarily
from fake.seam.guards import TensorGuards
from fake.seam.logging import log_state
from fake.seam.patches import LEDGER, Patch, Setting, When, always

_hook: Any = torch._C._dynamo.compiled_autograd
_C: Any = torch._C
set_autograd_compiler = _hook.set_autograd_compiler
clear_cache = _hook.clear_cache
is_cache_empty = _hook.is_cache_empty
set_verbose_logger = _hook.set_verbose_logger
call_cpp_tensor_pre_hooks = _hook.call_cpp_tensor_pre_hooks

# C++ binds each functional operator once per process, into whichever compiler is active.
# Keeping them in torch's own namespace lets both compilers be used in one process.
functional_operators: Any = torch_compiled_autograd.ops
copy_slices_prologue = torch_compiled_autograd.copy_slices_prologue
copy_slices_epilogue = torch_compiled_autograd.copy_slices_epilogue

Engine = torch._C._ImperativeEngine
BackwardFunction: Any = torch.autograd.function.BackwardCFunction
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
disable_modes = _disable_current_modes

current_graph_task_id = torch._C._current_graph_task_id
register_hook = torch.Tensor.register_hook
register_post_accumulate_grad_hook = torch.Tensor.register_post_accumulate_grad_hook
_NodeHooks: Any = torch.autograd.function._HookMixin
register_node_hook = _NodeHooks._register_hook
current_graph_task_execution_order = _C._current_graph_task_execution_order
will_engine_execute_node = torch._C._will_engine_execute_node
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
remove_hook = torch.utils.hooks.RemovableHandle.remove
trace_tensor_hook: Callable[..., Any] = TensorVariable._method_register_hook
trace_module_hooks: Callable[..., Any] = BackwardHookVariable.create

# C++ packs dtypes and layouts as the values of ``c10::ScalarType`` and ``c10::Layout``.
DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
STRIDED_CODE = 0

# Methods of torch's own compiler. A missing method or other parameters mean another protocol.
_KNOWN_METHODS: dict[str, tuple[str, ...]] = {
    "begin_capture": ("self, inputs, sizes, scalars, origins, accumulate_grad, check_nans",),
    "set_node_origin": ("self, node_name, nodecall_index, pyobj",),
    "bind_function": ("self, fn_name, fn, is_custom_function, is_traceable",),
    "apply_functional": ("self, fn_name, grads, args, output_metadata",),
    "validate_outputs": ("self, _, outputs, args, output_metadata",),
    "accumulate": ("self, old_var, new_var",),
    "accumulate_grad": (
        "self, variable, grad, has_post_hooks",
        "self, variable, variable_grad, grad, has_post_hooks",
    ),
    "unpack_hook": ("self, hook_id, data_id",),
    "tensor_pre_hook": ("self, inputs, hook_id, i",),
    "cpp_tensor_pre_hook": ("self, inputs, hook_id, i",),
    "pre_hook": ("self, inputs, hook_id",),
    "post_hook": ("self, outputs, inputs, hook_id",),
    "post_acc_grad_hook": ("self, input, hook_id",),
    "proxy_call_backward": (
        "self, inputs, output_metadatas, saved_tensors, backward_idx, ctx, maybe_backward_state_idx",
        "self, inputs, output_metadatas, saved_tensors, backward_idx, ctx, maybe_backward_state_idx, opaque_object_indices",
    ),
    "end_capture": ("self, outputs",),
}

# Since 2.13 C++ passes the leaf's gradient to ``accumulate_grad``, and expects the new one back.
ACCUMULATE_GRAD_RETURNS = (
    "variable_grad"
    in inspect.signature(torch_compiled_autograd.AutogradCompilerInstance.accumulate_grad).parameters
)


def hook_problem(compiler_class: Any = torch_compiled_autograd.AutogradCompilerInstance) -> str | None:
    """Return why this torch's engine hook is not the one we know, or None if it is."""
    for name, known in _KNOWN_METHODS.items():
        method = getattr(compiler_class, name, None)
        if method is None:
            return f"torch {torch.__version__}: its backward compiler has no method {name}"
        found = ", ".join(inspect.signature(method).parameters)
        if found not in known:
            return f"torch {torch.__version__}: {name}({found}) has other parameters than we know"
    return None


HOOK_PROBLEM = hook_problem()


# Torch functions that must take our passes into account while capturing is enabled.
_PATCHED_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "current_graph_task_id": (torch._C, "_current_graph_task_id"),
    "current_autograd_node": (torch._C, "_current_autograd_node"),
    "keeps_graph": (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    "execution_order": (torch._C, "_current_graph_task_execution_order"),
    "will_execute": (torch._C, "_will_engine_execute_node"),
    "push_saved_hooks": (torch._C._autograd, "_push_saved_tensors_default_hooks"),
    "pop_saved_hooks": (torch._C._autograd, "_pop_saved_tensors_default_hooks"),
    "register_hook": (torch.Tensor, "register_hook"),
    "register_post_accumulate_grad_hook": (torch.Tensor, "register_post_accumulate_grad_hook"),
    "register_node_hook": (_NodeHooks, "_register_hook"),
    "remove_hook": (torch.utils.hooks.RemovableHandle, "remove"),
    "set_autograd_compiler": (_hook, "set_autograd_compiler"),
    "clear_cache": (_hook, "clear_cache"),
    "trace_tensor_hook": (TensorVariable, "_method_register_hook"),
    "trace_module_hooks": (BackwardHookVariable, "create"),
}


def session_patches(engine: Callable[[], Any], **replacements: Callable[..., Any]) -> list[Patch]:
    """Return ledger entries for the engine and for functions that must take our passes into account.

    Args:
        engine: makes the replacement of torch's engine.
        replacements: functions to call instead of torch's own, by their names in :data:`_PATCHED_FUNCTIONS`.
    """
    lost = "capture of backward passes: they run in eager"
    common: Any = {"when": When.SESSION, "versions": None, "unfit": lambda: HOOK_PROBLEM or "", "lost": lost}
    return [
        Patch(torch.autograd.Variable, "_execution_engine", lambda _: engine(), **common),
        *(
            Patch(*_PATCHED_FUNCTIONS[name], always(function), **common)
            for name, function in replacements.items()
        ),
    ]


def requires_full_graph(translator: Any) -> bool:
    """Whether Dynamo's ``translator`` must produce one graph, without a backward pass inside."""
    return bool(translator.one_graph) and not dynamo_config.trace_autograd_ops


_DEFER_HOOKS = LEDGER.add(
    Setting(
        torch_compiled_autograd,
        "compiled_autograd_enabled",
        always(True),
        when=When.COMPILATION,
        versions=None,
        lost="hooks that Dynamo traced into one graph",
    )
)


def defer_hooks_to_backward() -> contextlib.AbstractContextManager[None]:
    """Make Dynamo leave hooks that it traces to the captured backward pass, as under torch's own capture.

    The flag is process-wide; Dynamo reads it while it holds its compile lock.
    """
    return LEDGER.in_force(*_DEFER_HOOKS)


def torch_verbose_logging() -> bool:
    """Whether ``TORCH_LOGS`` asks for verbose compiled autograd."""
    return log_state.log_state.is_artifact_enabled("compiled_autograd_verbose")


class _Probe(torch.autograd.Function):
    """A Function whose contexts show where C++ stores one of their flags."""


@functools.cache
def _materialize_grads_offset() -> int | None:
    """Return the byte offset of the flag that :func:`materializes_grads` reads, or None if ambiguous."""
    context: Any = _Probe._backward_cls()  # type: ignore[attr-defined]
    seen = []
    for value in (True, False, True):
        context.set_materialize_grads(value)
        seen.append(ctypes.string_at(id(context), type(context).__basicsize__))
    found = [offset for offset, values in enumerate(zip(*seen, strict=True)) if values == (1, 0, 1)]
    return found[0] if len(found) == 1 else None


def materializes_grads(ctx: Any) -> bool:
    """Whether this custom Function wants zeros for missing gradients.

    Python can set the flag but not read it, and the forward pass sets it long before anything is enabled, so
    this reads it from the C++ object's memory.
    """
    offset = _materialize_grads_offset()
    if not issubclass(type(ctx), torch._C._FunctionBase):
        return True
    return offset is None or bool(ctypes.string_at(id(ctx) + offset, 1)[0])


def untraceable_operator(operator: Any) -> Any | None:
    """Return the operator itself if torch wrapped a C++ function that must not be traced, else None."""
    return (
        getattr(operator, "__wrapped__", None) if getattr(operator, "_torchdynamo_disable", False) else None
    )


def inside_functorch() -> bool:
    """Whether a functorch transform (``vmap``, ``grad`` and so on) is active on this thread."""
    return torch._C._functorch.maybe_current_level() is not None


def tensor_guards(tensors: list[torch.Tensor]) -> Any:
    """Return an object whose ``check(*tensors)`` compares type, keys, dtype, device, sizes and strides."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


disable_dynamo = torch._dynamo.disable
"""Decorator: turns Dynamo's frame hook off. Results of ``torch.compile`` still compile inside."""


def free_compilation_stacks() -> None:
    """Free the Python stacks of past compilations that Dynamo's metrics keep for one error message.

    A stack keeps the code of its frames alive. After a graph break, that includes the compiled rest of the
    function with all its graphs, which neither ``torch._dynamo.reset()`` nor the garbage collector could
    free.
    """
    metrics = get_metrics_context()
    edits = getattr(metrics, "_edits", None)
    if edits and not metrics.in_progress():
        edits.clear()
        CapturedTraceback.extract()  # C++ releases the frames of dead stacks when it records the next one


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the ``torch.compile`` backend of that name. Torch raises its own error for an unknown one."""
    return registry.lookup_backend(name)


def steal_list(module: torch.fx.GraphModule, name: str) -> None:
    """Let Dynamo free elements of the list argument ``name`` while the compiled code runs."""
    torch._dynamo.utils.set_locals_to_steal(module, [name])


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo to make a dimension symbolic if it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_marked(tensor: Any) -> bool:
    """Whether the user told ``torch.compile`` which sizes of this tensor must be symbolic."""
    return bool(
        getattr(tensor, "_dynamo_dynamic_indices", None) or getattr(tensor, "_dynamo_unbacked_indices", None)
    )


def cudagraphs_enabled() -> bool:
    """Whether Inductor replays its compiled code as CUDA graphs."""
    inductor = sys.modules.get("torch._inductor.config")
    return inductor is not None and bool(inductor.triton.cudagraphs)


_TRACING_MODES = (TorchDispatchModeKey.FAKE, TorchDispatchModeKey.PROXY, TorchDispatchModeKey.FUNCTIONAL)


def is_tracing() -> bool:
    """Whether a compiler traces on this thread. Backward passes inside it are not the user's."""
    return bool(dispatch_mode_depth()) and any(get_dispatch_mode(key) is not None for key in _TRACING_MODES)


def is_compiled_function(function: Any) -> bool:
    """Whether AOTAutograd made this custom Function, and calls its backward the way we know."""
    return hasattr(function, "_aot_id") and hasattr(function, "_bw_prologue_fn")


def epilogue_results(function: Any, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return one gradient per input of ``function``, assembled from the results of its backward graph."""
    return tuple(function._bw_epilogue_fn(list(results)))


def backward_module(function: Any) -> fx.GraphModule | str:
    """Return the backward graph that AOTAutograd passed to its compiler, or why there is none."""
    info = function._lazy_backward_info
    if isinstance(info, AutogradLazyBackwardCompileInfo):
        return info.bw_module  # type: ignore[return-value]
    if isinstance(info, CachedAutogradLazyBackwardCompileInfo):
        with unset_fake_temporarily(), _disable_current_modes():
            return info.bw_module_fn()
    return "it came from a compile cache, without its backward graph"


_SEEDED_RANDOM_OPS = ("prims.inductor_random.default", "prims.inductor_randint.default")


def has_seeded_random_ops(module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers from seeds. Eager kernels ignore them; Inductor's do not."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(str(node.target) in _SEEDED_RANDOM_OPS for graph in graphs for node in graph.nodes)


def saved_symints(ctx: Any) -> Sequence[Any]:
    """Return the sizes that a compiled function saved, as C++ lifted them for this capture."""
    return ctx._get_compiled_autograd_symints()


def prologue_arguments(
    function: Any, saved: Any, numbers: Any, objects: Any, gradients: list[Any]
) -> list[Any]:
    """Return AOTAutograd's arguments, in order, for ``function``'s backward graph, gradients unchanged."""
    return function._bw_prologue_fn(saved, numbers, objects, gradients)


def tangent_formats(metadata: Any) -> list[tuple[Any, Any, Any]]:
    """Return the memory format, sizes and strides that a backward graph was traced for, per tangent."""
    formats = [tangent.memory_format for tangent in metadata.subclass_tangent_meta]
    return [(found.memory_format, found.size, found.stride) for found in formats]


def coerce_tangent(grad: Any, memory_format: Any, size: Any, stride: Any) -> torch.Tensor:
    """Convert a gradient that is not a plain tensor, as AOTAutograd does for a graph of plain tensors."""
    expected = PlainTensorMeta(0, MemoryFormatMeta(size, stride, memory_format))
    return AOTDispatchAutograd.process_runtime_tangent(grad, expected)[0]
