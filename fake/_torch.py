"""Every private name of torch that this package relies on, and every difference between its versions.

Nothing else in ``fake`` writes ``torch._x``: the next release of torch is this file's work.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
import torch.nested._internal.nested_tensor as nested_tensor_module
from torch._C import DisableTorchFunctionSubclass, TensorBase, _VariableFunctions as variable_functions
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.source import CallMethodItemSource, FloatTensorSource, RandomValueSource
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._library import fake_impl as library_fake_impl, simple_registry, utils as library_utils
from torch._subclasses import fake_impls, fake_tensor as torch_fake
from torch._subclasses.fake_tensor import (
    DispatchCacheInfo,
    FakeTensorConverter as TorchFakeTensorConverter,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    extract_tensor_metadata,
    get_schema_info,
    is_fake,
    maybe_get_fake_mode,
    run_fallback_kernel,
    should_allow_numbers_as_tensors,
    torch_decomp_decompositions,
)
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq, is_sparse_any
from torch._utils import render_call
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode, magic_methods
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    uninteresting_files,
)
from torch.fx.operator_schemas import normalize_function
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp
from torch.utils._sympy import functions as sympy_functions

from fake.seam.aot_autograd import config as functorch_config
from fake.seam.autograd_engine import current_autograd_node
from fake.seam.dispatch import (
    DispatchKey,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    TorchDispatchModeKey,
    decomposition_table,
    dispatch_keys,
    dispatch_mode_depth,
    get_dispatch_mode,
    has_storage,
    is_any_autocast_enabled,
    is_key_excluded,
    is_key_included,
    meta_table,
    no_dispatch,
)
from fake.seam.dynamo import config as dynamo_config
from fake.seam.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor as TorchFakeTensor,
    FakeTensorMode as TorchFakeTensorMode,
    FunctionalTensor,
    UnsupportedOperatorException,
    from_functional_tensor,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from fake.seam.guards import TracingContext
from fake.seam.logging import log_state
from fake.seam.pytree import arg_tree_leaves, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from fake.seam.symbolic_shapes import config as fx_experimental_config, int_oo

META_DEVICE = torch.device("meta")

make_subclass = torch.Tensor._make_subclass
serialization_state = torch.serialization._serialization_tls
has_compatible_data = torch._has_compatible_shallow_copy_type
throw_on_data_ptr = torch._C._set_throw_on_mutable_data_ptr
warn_on_data_ptr = torch._C._set_warn_deprecated_on_mutable_data_ptr
dispatch_key_set = torch._C._dispatch_key_set
disable_torch_dispatch = torch._C._DisableTorchDispatch
put_on_storage_of = torch._functionalize_unsafe_set
"""``put_on_storage_of(tensor, other)``: nothing but the storage is changed, the sizes above all are not looked at."""
copies_are_apart = partial(is_key_excluded, DispatchKey.ADInplaceOrView)
"""Whether ``detach`` gives a tensor that counts its own changes, as it does in the dispatch of an operator to a mode."""
resize_storage = torch.ops.inductor.resize_storage_bytes_.default
"""Gives a tensor a storage of so many bytes, which may be symbolic."""
DISPATCH_META_HANDLERS = torch_fake._DISPATCH_META_HANDLERS
DISPATCH_HANDLE_DIRECTLY = torch_fake._DISPATCH_HANDLE_DIRECTLY
check_for_subclass = torch_fake._check_for_subclass
fake_tensor_tls = torch_fake.fake_tensor_tls
is_plain_tensor = torch_fake._is_plain_tensor
ensure_cuda_device_guard: Any = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
meta_in_tls = torch._C._meta_in_tls_dispatch_include
PYTHON_KEY = DispatchKey.Python
META_KEY = DispatchKey.Meta

# What the dispatch of an operator may read from the thread: all of it is part of a cache key.
get_default_dtype = torch.get_default_dtype
get_default_device = torch._C._get_default_device
is_inference_mode_enabled = torch.is_inference_mode_enabled
is_grad_enabled = torch.is_grad_enabled
deterministic_algorithms = torch._C._get_deterministic_algorithms
deterministic_only_warns = torch._C._get_deterministic_algorithms_warn_only

_FAKE_KEY = TorchDispatchModeKey.FAKE
_PROXY_KEY = TorchDispatchModeKey.PROXY
_PYTHON_DISPATCHER = DispatchKey.PythonDispatcher
_PRE_DISPATCH_STATE = torch._ops._mode_stack_state_for_pre_dispatch
_PRE_DISPATCH_MODES = vars(_PRE_DISPATCH_STATE).get("_ModeStackStateForPreDispatch__infra_modes") or [None]
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def active_fake_mode() -> object | None:
    """The fake-tensor mode on the dispatch stack, torch's or ours."""
    return get_dispatch_mode(_FAKE_KEY)


def is_tracing() -> bool:
    """Whether ``make_fx`` records operators on this thread, before or after autograd."""
    return get_dispatch_mode(_PROXY_KEY) is not None or _PRE_DISPATCH_MODES[0] is not None


def is_python_dispatcher_enabled() -> bool:
    """Whether ``enable_python_dispatcher`` is on: it changes which decompositions run."""
    return is_key_included(_PYTHON_DISPATCHER)


def autocast_state() -> object:
    """False, or which devices cast to which dtype in this thread."""
    if not is_any_autocast_enabled():
        return False
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )


def registered_fake_kernel(func: OpOverload) -> object | None:
    """What ``torch.library.register_fake`` holds for an operator now, or None."""
    return simple_registry.singleton.find(func.name()).fake_impl.kernel


def fake_kernel_identity(func: OpOverload) -> object:
    """What changes when an operator's fake kernel is registered again."""
    kernel: object = registered_fake_kernel(func)
    return getattr(kernel, "func", kernel)


def fallback_is_possible(func: OpOverload) -> bool:
    """Whether a mode that allows it may run the operator's real kernel on zeros: only operators that torch tests."""
    return func.namespace in TorchFakeTensorMode._can_run_unsafe_fallback_allowed_namespaces


def custom_ops_profiles() -> object | None:
    """The operator profiles that draft export collected, if it is running."""
    return getattr(dynamo_config, "_custom_ops_profile", None)


def copy_node(node: SymNode) -> SymNode:
    """A new node that shares all attributes with ``node``: what is learned about one holds for the other."""
    copied = object.__new__(node.__class__)
    copied.__dict__ = node.__dict__
    return copied


def make_symbolic_functional(cls: type, elem: torch.Tensor) -> torch.Tensor:
    """What ``FunctionalTensor.__new__`` makes of a functional tensor with symbolic sizes outside inference mode."""
    _meet_numbers(elem)
    extra = FunctionalTensor._extra_dispatch_keys & dispatch_keys(elem)
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, elem.shape, elem.stride(), elem.storage_offset(), None, elem.dtype, elem.layout, elem.device,
        False, elem.requires_grad, None, False, False, extra, elem.untyped_storage().nbytes(),
    )  # fmt: skip
    throw_on_data_ptr(made)
    made.elem = elem
    return made


_STORAGE_SIZE_IS_GIVEN = "storage_size" in FunctionalTensor.__new__.__code__.co_varnames
"""Whether torch computes nothing there either (from 2.15 on)."""


def _meet_numbers(elem: torch.Tensor) -> None:
    """Put the sizes and strides of a tensor into the trace that records arithmetic, in the order in which torch meets them
    when it computes the size of a storage: they are in the graph from there on."""
    mode: Any = get_dispatch_mode(_PROXY_KEY)
    if mode is None or mode.tracer.enable_thunkify or _STORAGE_SIZE_IS_GIVEN:
        return
    for pair in zip(elem.shape, elem.stride(), strict=True):
        for number in pair:
            if isinstance(number, torch.SymInt):
                proxy = proxy_tensor.get_proxy_slot(number, mode.tracer, None)
                if proxy is not None:
                    proxy.force()


def is_tracing_graph() -> bool:
    """Whether ``make_fx`` is tracing."""
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def nodes_matter() -> bool:
    """Whether somebody may look at which node a symbolic number has: a trace does, and what runs under functionalization
    may become an input of one."""
    return is_tracing_graph() or is_key_included(_FUNCTIONALIZE)


_FUNCTIONALIZE = DispatchKey.Functionalize


def symbolic_arithmetic_is_watched() -> bool:
    """Whether ``make_fx`` records symbolic arithmetic, or the structured log does."""
    return (
        get_dispatch_mode(_PROXY_KEY) is not None
        or _PRE_DISPATCH_MODES[0] is not None
        or log_state.GET_DTRACE_STRUCTURED
    )


arithmetic_watchers = (get_dispatch_mode, _PROXY_KEY, _PRE_DISPATCH_MODES, log_state)
"""The parts of the same question, for where a call of a function is too much."""

# What tells that a symbol may have been replaced. Until 2.11 there was one counter for all that is known.
replacements_version = operator.attrgetter(
    "_replacements_version_counter"
    if "_replacements_version_counter" in ShapeEnv._init.__code__.co_names
    else "_version_counter"
)


def backed_size_oblivious() -> bool:
    """torch's setting that makes backed sizes answer like unbacked ones."""
    return fx_experimental_config.backed_size_oblivious


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether a size, stride or offset of a tensor is symbolic."""
    return tensor._has_symbolic_sizes_strides


def builtin_fake_kernels_exist() -> bool:
    """Whether ``register_fake`` was called for an operator of torch's own."""
    entries = list(simple_registry.singleton._data.items())
    return any(name.startswith("aten::") and entry.fake_impl.kernel is not None for name, entry in entries)


def dispatch_modes_active() -> bool:
    """Whether any dispatch mode of the user is on this thread (fake modes are looked at separately)."""
    return dispatch_mode_depth() > (active_fake_mode() is not None)


def guards_are_suppressed() -> bool:
    """Whether this thread asks symbolic questions without recording guards."""
    return ShapeEnv._suppress_guards_tls()


def is_plain_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an unwrapped meta tensor, safe to keep as the storage of a fake one."""
    if type(tensor) is not torch.Tensor:
        return False
    keys = dispatch_keys(tensor)
    return keys.has(META_KEY) and not keys.has(PYTHON_KEY)


class _HiddenFiles:
    """Files whose frames torch passes over when it notes which line of code asked for a guard.

    Our frames stand between its symbols and its kernels; torch's list of such files is extended once it exists
    (computing it imports much, and the first symbol does so).
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._shown_to_torch = False

    def add(self, name: str) -> None:
        """Hide a file, now or as soon as torch has symbols."""
        self._names.add(name)
        if self._shown_to_torch:
            uninteresting_files().add(name)

    def tell_torch(self) -> None:
        """Extend torch's list; to be called once there are symbols."""
        if not self._shown_to_torch:
            uninteresting_files().update(self._names)
            self._shown_to_torch = True


HIDDEN_FILES = _HiddenFiles()

shape_env_changes = tuple(
    name
    for name in (
        "_constrain_is_bounded", "_constrain_range", "_constrain_range_for_size", "_constrain_unify",
        "_eliminate_unbacked", "_rename_unbacked_to", "constrain_symbol_range", "create_symbol",
        "create_unbacked_symbool", "create_unbacked_symfloat", "create_unbacked_symint",
        "create_unspecified_symbol", "set_real_tensor_prop_unbacked_vals", "set_unbacked_var_to_val",
    )
    if hasattr(ShapeEnv, name)
)  # fmt: skip
"""Methods that change what a shape environment knows, besides questions."""
