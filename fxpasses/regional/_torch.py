"""Private torch names of regions: tracing and metadata of AOTAutograd, symbolic sizes, and calls in Dynamo graphs."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._prims_common import get_computation_dtype as computation_dtype
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fake.seam.aot_autograd import OutputType, config as functorch_config
from fake.seam.dispatch import (
    DispatchKey,
    DispatchKeySet,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    enable_python_dispatcher,
    get_dynamic_layer_stack_depth,
    has_symbols,
    is_functorch_wrapped_tensor,
    local_exclude_set,
    local_include_set,
    set_grad_enabled,
    storage_of as base_storage_of,
)
from fake.seam.fake_tensor import FakeTensor, FunctionalTensor, FunctionalTensorMode, from_functional_tensor
from fake.seam.fx import detect_fake_mode
from fake.seam.guards import TracingContext, tracing
from fake.seam.inductor import config as inductor_config
from fake.seam.symbolic_shapes import Max, SymT, hints_of, symbol_is_type
from fxpasses._torch import wrapper_arguments
from fxpasses.regional._torch_dtensor import local_of

_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

INLINED_OPERATORS = frozenset({"tag_activation_checkpoint", "autograd_function_apply"})
"""Higher-order operators that AOTAutograd traces through: it inlines their bodies into the graph."""


def enters_autocast(node: fx.Node) -> bool:
    """Whether Dynamo inserted this node to enter an autocast block."""
    return node.target is _ENTER_AUTOCAST


def exits_autocast(node: fx.Node) -> bool:
    """Whether Dynamo inserted this node to exit an autocast block."""
    return node.target is _EXIT_AUTOCAST


def sets_grad_mode(node: fx.Node) -> bool:
    """Whether this node enables or disables gradient recording."""
    return node.target is set_grad_enabled


_LAZY = [DispatchKeySet(key) for key in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor)]


def resolve_lazy_conj_and_neg() -> Any:
    """Return a context in which operators resolve lazy conjugates and negatives.

    Under a dispatch mode (AOTAutograd's check of custom operators in the first call, or a user's own) a
    Python kernel runs without that, and takes ``x.conj()`` for ``x``.
    """
    excluded = local_exclude_set()
    if not excluded.has(DispatchKey.Conjugate):
        return contextlib.nullcontext()
    still_excluded = functools.reduce(operator.sub, _LAZY, excluded)
    return torch._C._ForceDispatchKeyGuard(local_include_set(), still_excluded)


def context_calls() -> tuple[Any, Any, Any]:
    """Return the functions that enter autocast, exit it, and set the gradient mode."""
    return _ENTER_AUTOCAST, _EXIT_AUTOCAST, set_grad_enabled


def transform_nesting(calls: Sequence[fx.Node]) -> tuple[list[bool], list[int]]:
    """Return which calls a transform or mode rules out of a region, and the depth of ``vmap``.

    The depth is the number of open ``vmap`` before each call and after the last. A region may contain a whole
    ``vmap``, but not ``grad`` or ``jvp``, which pass tensors to more than the calls that read them.
    """
    opened: list[bool] = []
    found, depth = [], []
    for node in calls:
        name = str(getattr(node.target, "__name__", ""))
        is_vmap = name in _VMAP_CALLS
        depth.append(len(opened))
        if name.endswith("_increment_nesting"):
            opened.append(is_vmap)
        found.append(not all(opened) or (_is_transform_call(node, name) and not is_vmap))
        if name.endswith("_decrement_nesting"):
            if not opened:
                return [True] * len(calls), [0] * (len(calls) + 1)
            opened.pop()
    if opened:
        return [True] * len(calls), [0] * (len(calls) + 1)
    return found, [*depth, 0]


_VMAP_CALLS = frozenset(
    {"_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim", "lazy_load_decompositions"}
)  # fmt: skip


def _is_transform_call(node: fx.Node, name: str) -> bool:
    module = str(getattr(node.target, "__module__", "") or "")
    if module.startswith(("torch._functorch", "torch._C._functorch", "torch.autograd.forward_ad")):
        return True
    return name.startswith(_TRANSFORM_PREFIXES) and not (enters_autocast(node) or exits_autocast(node))


_TRANSFORM_PREFIXES = (
    "_enter_",
    "_exit_",
    "_vmap_",
    "_grad_",
    "_jvp_",
    "_saved_tensors_hooks_",
    "_set_fwd_grad_enabled",
)


def is_inlined_operator(target: Any) -> bool:
    """Whether AOTAutograd inlines the body of this higher-order operator."""
    return isinstance(target, HigherOrderOperator) and target.name() in INLINED_OPERATORS


def is_checkpoint_call(node: fx.Node) -> bool:
    """Whether this calls a checkpointed function, whose graph is the first argument."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "tag_activation_checkpoint"


def checkpoint_policy(body: fx.GraphModule) -> Any:
    """Return the policy that decides which results a checkpointed function saves; ``None`` saves none."""
    return body.meta.get("_checkpoint_context_fn")


def expression(value: Any) -> Any:
    """Return a symbolic number's sympy expression, its value if known, or any other value unchanged."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = value.node.expr
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Float):
            return float(expr)
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        return expr
    return value


def _apply_or_record(function: Callable[..., Any], x: Any, *rest: Any) -> Any:
    """Apply a function that Python calls for an integer at once, or record a call on a graph's number."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *rest), {})
    return function(x, *rest)


class _PythonNumbers(PythonReferenceAnalysis):
    """Torch's arithmetic on plain, symbolic and graph numbers, without the two operations left to sympy."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _apply_or_record(math.trunc, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _apply_or_record(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _apply_or_record(math.ceil, x)

    @staticmethod
    def round_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _apply_or_record(round, x)

    @staticmethod
    def round_decimal(x: Any, digits: Any) -> Any:
        return _apply_or_record(round, x, digits)

    @staticmethod
    def floor(x: Any) -> Any:
        return torch.sym_float(_apply_or_record(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return torch.sym_float(_apply_or_record(math.ceil, x))


def evaluate(value: Any, bindings: Mapping[Any, Any]) -> Any:
    """Substitute ``bindings`` in a recorded size. Returns a number, or a symbolic one of the caller's."""
    if not isinstance(value, sympy.Basic):
        return value
    if value in bindings:
        return bindings[value]
    return sympy_interp(_PythonNumbers, dict(bindings), value)


def has_unbacked(value: Any) -> bool:
    """Whether a symbolic number depends on data."""
    return bool(free_unbacked_symbols(value))


def depends_only_on_sizes(value: Any) -> bool:
    """Whether a symbolic number is computed only from sizes of inputs."""
    symbols = free_symbols(value)
    return bool(symbols) and all(symbol_is_type(symbol, SymT.SIZE) for symbol in symbols)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id that tensors share if they share memory.

    A tensor inside a function transform has the id of the tensor it wraps. One without memory has its own.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    tensor = local_of(tensor)
    storage = base_storage_of(tensor)
    return id(tensor) if storage is None else storage


def hint_and_range(shape_env: Any, symbol: sympy.Symbol) -> tuple[str, str]:
    """Return a symbol's size hint and its range at compile time: all that guards depend on."""
    return str(hints_of(shape_env).get(symbol)), str(shape_env.var_to_range.get(symbol))


@contextlib.contextmanager
def region_tracing_context(fake_mode: Any) -> Iterator[None]:
    """Set AOTAutograd up for a region: its own tracing context, eager backward compilation, and no cache.

    A hit in AOTAutograd's cache would return one callable for both passes, but we need the two inside.
    Inductor's own cache is not affected.
    """
    with (
        tracing(TracingContext(fake_mode)),
        functorch_config.patch({"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}),
    ):
        yield


@contextlib.contextmanager
def output_strides() -> Iterator[list[Any]]:
    """Yield a list that Inductor fills with the strides of a graph's outputs."""
    with TracingContext.report_output_strides() as strides:
        yield strides if strides is not None else []


def forward_metadata() -> Any:
    """Return AOTAutograd's metadata of the graph that it is compiling."""
    return TracingContext.get().fw_metadata


def unsupported_metadata(metadata: Any) -> str:
    """Return why AOTAutograd's metadata of a region rules it out, or ""."""
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        return "it changes one of its inputs"
    allowed = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    if any(info.output_type not in allowed for info in metadata.output_info):
        return "one of its outputs shares memory with an input or another output"
    if getattr(metadata, "tokens", None):
        return "it has side effects whose order matters"
    if metadata.is_rng_op_functionalized or getattr(metadata, "num_graphsafe_rng_states", 0):
        return "its random numbers need a state of their own"
    return ""


def outputs_with_gradient(metadata: Any) -> list[bool]:
    """Return, per output, whether the backward graph takes a gradient for it."""
    return [bool(info.requires_grad) for info in metadata.output_info]


def mark_as_dynamo_graph(gm: fx.GraphModule) -> None:
    """Let AOTAutograd see at placeholders which inputs live as long as the model, as with Dynamo's."""
    gm.meta["dynamo_compile_id"] = None
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for node in gm.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None  # type: ignore[attr-defined]


def copy_dynamo_attributes(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """Copy Dynamo's attributes of a graph, which tell AOTAutograd where inputs and parameters come from."""
    for name, value in vars(old).items():
        if name.startswith(("_param_name", "dynamo_", "_backend_id", "compile_subgraph_reason")):
            object.__setattr__(new, name, value)
    for a, b in zip(old.graph.nodes, new.graph.nodes, strict=True):
        if hasattr(a, "_dynamo_source"):
            b._dynamo_source = a._dynamo_source


def reason_against_regions() -> str:
    """Return why settings of this process rule regions out, or ""."""
    if wrapper_arguments():
        return "Inductor's cpp_wrapper and fx_wrapper have no calls back into Python"
    if inductor_config.freezing and not torch.is_grad_enabled():
        return "freezing makes each layer's parameters constants of its own code"
    if functorch_config.functionalize_rng_ops:
        return "functionalize_rng_ops hands the random state through the whole graph"
    return ""


def ambient_state() -> str:
    """Return the process-wide state that affects how operators are traced."""
    devices = ("cpu", "cuda")
    autocast = [(d, str(torch.get_autocast_dtype(d))) for d in devices if torch.is_autocast_enabled(d)]
    return repr((autocast, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()))


@contextlib.contextmanager
def fake_execution(fake_mode: Any) -> Iterator[None]:
    """Run a Dynamo graph on fake tensors to observe it. Unbacked sizes that this creates are ignored."""
    shape_env = fake_mode.shape_env
    ignoring = contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
    # Without the Python dispatcher, composite operators would request symbolic sizes as integers.
    with ignoring, fake_mode, enable_python_dispatcher(), torch.no_grad():
        depth = get_dynamic_layer_stack_depth()
        try:
            yield
        finally:  # it may fail inside a vmap
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def unwrap_functional(tensors: Sequence[Any], mode: Any) -> list[torch.Tensor]:
    """Return the tensors inside functional tensors, after all writes to them."""
    views = [t for t in tensors if not torch._is_functional_tensor_base(t.elem)]
    annotate = getattr(mode, "_sync_view_replay_annotations", None)  # torch 2.12 and newer
    if views and annotate is not None:  # nodes that replay views keep the origin of the views
        annotate((views,), {})
    for tensor in tensors:
        torch._sync(tensor)
    return [from_functional_tensor(tensor.elem) for tensor in tensors]


def wrap_functional(tensor: torch.Tensor, mode: Any) -> Any:
    """Wrap a fresh tensor as a functional one, below autograd."""
    return FunctionalTensor(torch._to_functional_tensor(tensor), mode)


original_operator = proxy_tensor.set_original_aten_op
thunks = proxy_tensor._enable_thunkify


def proxies_of(mode: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
    """Return the proxies of tensors and sizes, or ``None`` if one is not a plain tensor of the trace."""
    tracer = mode.tracer
    if not isinstance(tracer, proxy_tensor.PythonKeyTracer):
        return None
    proxies = []
    for tensor in tensors:
        entry = tracer.tensor_tracker.get(tensor)
        if entry is None or type(tensor) not in proxy_tensor.HANDLED_TYPES:
            return None
        proxies.append(entry.proxy)
    numbers = proxy_tensor._fetch_proxies_and_all_constant_flag(list(sizes), tracer)[1] if sizes else ()
    return proxies, list(numbers)


def proxy_of_call(tracer: Any, operator: OpOverload, args: tuple[Any, ...]) -> Any:
    """Create the proxy of a new call in a trace, with a name like torch's own."""
    name = tracer.graph._target_to_str(operator._opname)
    return tracer.create_proxy("call_function", operator, args, {}, name=name)


set_value = proxy_tensor.set_meta


layout_of = proxy_tensor._extract_tensor_metadata


def track(result: torch.Tensor, proxy: Any, value: Any, layout: Any, tracer: Any) -> None:
    """Record in a trace that ``proxy``'s node computes ``result``, with a fake ``value`` and layout."""
    if has_symbols(result):
        proxy_tensor.track_tensor(result, proxy, constant=None, tracer=tracer)
    else:
        proxy_tensor.set_proxy_slot(result, tracer, proxy_tensor._ProxyTensor(proxy, None))
    proxy.node.meta["val"] = value
    proxy.node.meta["tensor_meta"] = layout
