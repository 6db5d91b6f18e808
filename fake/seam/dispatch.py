"""Operators and the dispatcher: its keys, its modes, and torch's kernels in Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    DispatchKey,
    DispatchKeySet,
    TensorBase,
    _AutoDispatchBelowAutograd as BelowAutograd,
    _DisableAutocast as DisableAutocast,
    _dispatch_dump as dispatch_table,
    _dispatch_has_kernel_for_dispatch_key as has_kernel,
    _dispatch_keys as dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded as is_key_excluded,
    _dispatch_tls_is_dispatch_key_included as is_key_included,
    _dispatch_tls_local_exclude_set as local_exclude_set,
    _dispatch_tls_local_include_set as local_include_set,
    _get_dispatch_mode as get_dispatch_mode,
    _has_storage as has_storage,
    _is_any_autocast_enabled as is_any_autocast_enabled,
    _len_torch_dispatch_stack as dispatch_mode_depth,
    _len_torch_function_stack as function_mode_depth,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled as set_grad_enabled,
    _TorchDispatchModeKey as TorchDispatchModeKey,
    _VariableFunctions as variable_functions,
)
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._decomp import decomposition_table, meta_table
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops import utils as higher_order_utils
from torch._library import fake_impl as library_fake_impl, simple_registry, utils as library_utils
from torch._library.custom_ops import OPDEFS, CustomOpDef as TorchCustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    is_non_overlapping_and_dense_or_false as is_dense,
    suggest_memory_format,
)
from torch._utils import render_call
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes as disable_current_modes

collectives = torch.ops._c10d_functional
"""The operators of functional collectives."""
check = torch._check
"""``check(condition, message)`` raises eager's ``RuntimeError`` if the condition does not hold."""

META_DEVICE = torch.device("meta")
registered_hop_fake_fns = higher_order_utils.registered_hop_fake_fns

make_subclass = torch.Tensor._make_subclass
serialization_state = torch.serialization._serialization_tls
has_compatible_data = torch._has_compatible_shallow_copy_type
throw_on_data_ptr = torch._C._set_throw_on_mutable_data_ptr
warn_on_data_ptr = torch._C._set_warn_deprecated_on_mutable_data_ptr
dispatch_key_set = torch._C._dispatch_key_set
disable_torch_dispatch = torch._C._DisableTorchDispatch
replace_storage = torch._functionalize_unsafe_set
"""``replace_storage(tensor, other)`` replaces only the storage; sizes, above all, are not checked."""
is_view_tracking_off = functools.partial(is_key_excluded, DispatchKey.ADInplaceOrView)
"""Returns whether ``detach`` returns a tensor with its own version counter, as when an operator is dispatched
to a mode."""
resize_storage = torch.ops.inductor.resize_storage_bytes_.default
"""Resizes the storage of a tensor to a number of bytes, which may be symbolic."""
ensure_cuda_device_guard: Any = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
meta_in_tls = torch._C._meta_in_tls_dispatch_include
PYTHON_KEY = DispatchKey.Python
META_KEY = DispatchKey.Meta

# Thread state that the dispatch of an operator may read: all of it is part of a cache key.
get_default_device = torch._C._get_default_device
deterministic_algorithms = torch._C._get_deterministic_algorithms
deterministic_only_warns = torch._C._get_deterministic_algorithms_warn_only

_FAKE_KEY = TorchDispatchModeKey.FAKE
_PYTHON_DISPATCHER = DispatchKey.PythonDispatcher
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def onednn_linear(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``a @ weight.t()`` plus ``bias`` per row with oneDNN, looked up at run time:
    some builds lack it.

    Args:
        a: float32[rows, inner].
        weight: float32[columns, inner], with any strides.
        bias: float32[columns], or None.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a, weight, bias, "none", [], "")
    return result


def active_fake_mode() -> object | None:
    """Return the fake-tensor mode on the dispatch stack, torch's or ours, or None."""
    return get_dispatch_mode(_FAKE_KEY)


def is_python_dispatcher_enabled() -> bool:
    """Return whether ``enable_python_dispatcher`` is on: it changes which decompositions run."""
    return is_key_included(_PYTHON_DISPATCHER)


def autocast_state() -> object:
    """Return the autocast dtype of each device with autocast enabled in this thread, or False."""
    if not is_any_autocast_enabled():
        return False
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )


def registered_fake_kernel(func: OpOverload) -> object | None:
    """Return the kernel currently registered for an operator by ``torch.library.register_fake``, or None."""
    return simple_registry.singleton.find(func.name()).fake_impl.kernel


def fake_kernel_identity(func: OpOverload) -> object:
    """Return an object that changes when an operator's fake kernel is registered again."""
    kernel: object = registered_fake_kernel(func)
    return getattr(kernel, "func", kernel)


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return an identifier of a tensor's storage; None for tensors that are not strided."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def has_symbols(tensor: torch.Tensor) -> bool:
    """Return whether a size, stride or offset of a tensor is symbolic."""
    return tensor._has_symbolic_sizes_strides


def has_builtin_fake_kernels() -> bool:
    """Return whether ``register_fake`` was called for one of torch's own operators."""
    entries = list(simple_registry.singleton._data.items())
    return any(name.startswith("aten::") and entry.fake_impl.kernel is not None for name, entry in entries)


def has_user_dispatch_mode() -> bool:
    """Return whether any dispatch mode of the user is active on this thread (fake modes do not count)."""
    return dispatch_mode_depth() > (active_fake_mode() is not None)


def is_plain_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an unwrapped meta tensor, safe to use as the storage of a fake one."""
    if type(tensor) is not torch.Tensor:
        return False
    keys = dispatch_keys(tensor)
    return keys.has(META_KEY) and not keys.has(PYTHON_KEY)


# --- for operator rules ----------------------------------------------------------------------------
#: The dispatch key of kernels that are composed of other operators, autograd included.
COMPOSITE = DispatchKey.CompositeImplicitAutograd

#: The highest dispatch key of tensor subclasses and dispatch modes that real tensors outside of modes do not
#: have.
PYTHON_SNAPSHOT = DispatchKey.PythonTLSSnapshot.name
BELOW_PYTHON_SNAPSHOT = torch._C._dispatch_keyset_full_after(DispatchKey.PythonTLSSnapshot)

_VIEWS_KEY = DispatchKey.ADInplaceOrView
_STRUCTURED_KEY = DispatchKey.CompositeExplicitAutogradNonFunctional


@functools.cache
def hides_structured_meta(func: OpOverload) -> bool:
    """Return whether a Python registration hides ``func``'s structured C++ meta function.

    All backends of a structured operator share one C++ meta function, so its answer is eager's. torch
    registers Python versions over many of them, because the C++ ones do not support symbolic sizes.
    """
    dump = dispatch_table(func.name())
    return "Meta (inactive)" in dump and _STRUCTURED_KEY.name in dump


def structured_meta(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``func``'s structured C++ meta function, hidden or not.

    The dispatcher keeps it reachable in one place: the composite kernel that runs the meta function,
    allocates the outputs that it requests, and calls the out variant. On meta tensors nothing is computed.
    """
    return func._op_dk(_STRUCTURED_KEY, *args, **kwargs)


def has_composite_kernel(func: OpOverload) -> bool:
    """Return whether an operator is composed of others in C++, autograd and views included."""
    return has_kernel(func.name(), COMPOSITE.name) and not has_kernel(func.name(), _VIEWS_KEY.name)


@contextlib.contextmanager
def eager_execution() -> Iterator[None]:
    """Run real kernels on real tensors: no mode sees a call, autograd does not record it,
    autocast does not change it."""
    with no_dispatch(), DisableTorchFunction(), BelowAutograd(), DisableAutocast():
        yield


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Hide calls from the user's ``TorchFunctionMode``s: Dynamo's graph already contains their effect."""
    modes = [_pop_torch_function_stack() for _ in range(function_mode_depth())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_on_torch_function_stack(mode)


@contextlib.contextmanager
def track_views() -> Iterator[None]:
    """Make views record their bases inside, even where a dispatch mode has taken over."""
    excluded = is_key_excluded(_VIEWS_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS_KEY, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS_KEY, excluded)


def conv_backend(input: torch.Tensor, weight: torch.Tensor, given: Mapping[str, Any]) -> Any:
    """Return the library that eager would use to compute a convolution.

    Args:
        input: the images.
        weight: the filters.
        given: the other arguments by name.
    """
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return torch._C._select_conv_backend(input, weight, None, *(given[name] for name in names), None)


# --- for the cache and tracers ----------------------------------------------------------------------
def uncached_higher_order_operators() -> set[Any]:
    """Return higher-order operators whose authors exclude their fake implementation from caching."""
    return getattr(higher_order_utils, "hops_that_skip_faketensor_cache", set())


def wrapped_subgraph(value: object) -> Any:
    """Return the graph inside a callable that torch wraps around a subgraph, or None."""
    wrapper = getattr(higher_order_utils, "SubgraphCallableWrapper", None)
    wrapper = wrapper or getattr(higher_order_utils, "FunctionalizeCtxWrapper", None)
    return value.subgraph if wrapper is not None and isinstance(value, wrapper) else None  # type: ignore[attr-defined]
