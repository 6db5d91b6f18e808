"""``torch._library``: custom operators, their schemas and registrations, and torch's own checks of them."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.library as torch_library
from torch import _C
from torch._library import fake_profile, opaque_object as _opaque_object
from torch._library.autograd import supports_tensorlist
from torch._library.custom_ops import OPDEF_TO_LIB, _maybe_get_opdef as maybe_get_opdef
from torch._library.effects import EffectType
from torch._library.infer_schema import SUPPORTED_PARAM_TYPES
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from fake.error_text import error_text
from fake.seam import pytree
from fake.seam.dispatch import (
    OPDEFS,
    BelowAutograd,
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    OpOverloadPacket,
    TorchCustomOpDef,
    dispatch_keys,
    dispatch_table,
    has_kernel,
    library_fake_impl,
    library_utils as _utils,
    local_exclude_set,
    local_include_set,
    simple_registry,
    storage_of,
)
from fake.seam.eval_frame import get_eval_frame_callback as eval_frame_callback
from fake.seam.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from fake.seam.guards import TensorGuards

# --- the dispatcher's state -------------------------------------------------------------------------
torch_function_mode_enabled = _C._is_torch_function_mode_enabled
profiler_enabled = _C._autograd._profiler_enabled


def tensors_like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a function that checks whether tensors match these in type, dispatch keys (including the
    thread's state), dtype, device, number of dimensions and ``requires_grad``. The same tensor passed twice
    is refused.

    >>> same = tensors_like(torch.ones(2))
    >>> same(torch.ones(3)), same(torch.ones(2, 2)), same(None)
    (True, False, False)
    """
    any_size: list[Any] = [[None] * tensor.dim() for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=any_size, dynamic_dims_strides=any_size).check


#: The guard that torch enters around the kernel of a mutating operator. Older versions also keep the kernel's
#: own operations from bumping versions.
BelowMutation = (
    BelowAutograd
    if hasattr(TorchCustomOpDef, "_register_mutation_version_bump")
    else _C._AutoDispatchBelowADInplaceOrView
)
any_output_is_alias = _C._any_output_is_alias_to_input_or_output
increment_version = _C._increment_version
after_autograd_keyset = _C._after_autograd_keyset
#: Names of all kernels registered from Python through any ``torch.library.Library``.
python_registrations: set[str] = torch_library._impls  # type: ignore[attr-defined]
#: Files (or prefixes of their names) of torch's code that registers on behalf of its callers.
REGISTRATION_FILES = (torch_library.__file__, str(Path(_utils.__file__).parent))


@cache
def default_dispatch_state() -> tuple[int, int]:
    """Return the raw include and exclude sets of a thread in which nothing has been entered."""
    state: list[tuple[int, int]] = []

    def read() -> None:
        state.append((local_include_set().raw_repr(), local_exclude_set().raw_repr()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return state[0]


# --- operators and schemas -------------------------------------------------------------------------
parse_schema = _C.parse_schema
parse_namespace = _utils.parse_namespace
is_functional_schema = _utils.is_functional_schema
has_kwarg_only_tensors = _utils.has_kwarg_only_tensors
is_tensorlist_like_type = _utils.is_tensorlist_like_type
fill_defaults = _utils.fill_defaults
any_requires_grad = _C._any_requires_grad
has_computed_kernel_for_key = _C._dispatch_has_computed_kernel_for_dispatch_key
key_for_device = _C._dispatch_key_for_device
fallthrough_kernel = torch_library.fallthrough_kernel

parse_dispatch_key = _C._parse_dispatch_key

INPLACE_TAG = getattr(torch.Tag, "inplace", None)
OUT_TAG = getattr(torch.Tag, "out", None)


def op_overload_name(op: OpOverload) -> str:
    """Return ``ns::name`` or ``ns::name.overload``."""
    return op._name


def find_schema(qualname: str) -> Any | None:
    """Return the schema of an operator, or None if it does not exist."""
    name, _, overload = qualname.partition(".")
    if _C._get_operation_overload(name, overload) is None:
        return None
    return _C._get_schema(name, overload)


def is_view_schema(schema: Any) -> bool:
    return bool(schema._is_view_op()) if hasattr(schema, "_is_view_op") else False


def set_source_of_fake(qualname: str, function: Callable[..., Any]) -> None:
    """Record the location of ``function`` as that of the operator's fake kernel, for error messages."""
    kernel = simple_registry.singleton.find(qualname).fake_impl.kernel
    code = getattr(function, "__code__", None)
    if kernel is not None and code is not None:
        kernel.source = f"{code.co_filename}:{code.co_firstlineno}"


class _Running(threading.local):
    context: Any = None


_RUNNING = _Running()
"""The running fake kernel of each thread: torch has one variable for all threads."""


@contextmanager
def running_fake_kernel(mode: Any, func: OpOverload) -> Iterator[None]:
    """Make `fake_kernel_context` and ``torch.library.get_ctx`` return a context of
    this mode in this thread."""
    before, _RUNNING.context = _RUNNING.context, library_fake_impl.FakeImplCtx(mode, func)
    try:
        with library_fake_impl.set_ctx_getter(lambda: _RUNNING.context):
            yield
    finally:
        _RUNNING.context = before


def fake_kernel_context() -> Any:
    """Return the context of the fake kernel running in this thread, or None outside of one."""
    return _RUNNING.context or library_fake_impl.global_ctx_getter()


def replace_library(op: TorchCustomOpDef, library: Any) -> None:
    """Make a custom op under construction register through ``library`` instead of the one that torch made."""
    op._lib._destroy()
    op._lib = OPDEF_TO_LIB[op._qualname] = library


def take_library(qualname: str) -> Any | None:
    """Remove and return the library that torch keeps for the custom op with that name."""
    return OPDEF_TO_LIB.pop(qualname, None)


@contextmanager
def suppress_override_warning() -> Iterator[None]:
    """Silence torch's one-time warning that a dispatcher kernel is being replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        yield


# --- torch's own operator checks --------------------------------------------------------------------
# These modules import Dynamo, which takes seconds; defining and calling operators needs none of them.
def _optests() -> Any:
    from torch.testing._internal.optests import generate_tests

    return generate_tests


def load_optests_copy() -> Any:
    """Return a second copy of torch's module of generated checks, in which names can be replaced."""
    spec: Any = _optests().__spec__
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: The module that torch's repro scripts import a check from.
OPTESTS = "torch.testing._internal.optests"


def optest(name: str) -> Any:
    """Return one of torch's checks as a function, or a helper of its tests."""
    from torch.testing._internal.optests import aot_autograd

    return getattr(_optests() if hasattr(_optests(), name) else aot_autograd, name)


def resolve_overload(packet: OpOverloadPacket) -> OpOverload:
    """Return the only overload of a packet; raises RuntimeError if there are several."""
    return _optests().resolve_unique_overload_or_throw(packet)


def is_defined_in_python(op: OpOverload) -> bool:
    return bool(op._defined_in_python)


def backend_key_of(args: Any, kwargs: Any) -> str | None:
    """Return the dispatch key of the device that a call runs on, or None if it has no tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = sorted({t.device.type for t in tensors}, key=lambda d: d == "cpu")
    return key_for_device(devices[0]) if devices else None


def call_at_key(op: OpOverload, key: str, args: Any, kwargs: Any) -> Any:
    """Call the kernel behind one dispatch key.

    Args:
        op: the operator.
        key: the name of the key.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    return op.redispatch(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def run_functionalized(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Call an operator through AOTAutograd's functionalization, with a compiler that changes nothing.

    Args:
        op: the operator.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
        return op(*inner_args, **inner_kwargs)

    from functorch.compile import aot_function, nop

    compiled = aot_function(run, fw_compiler=nop, bw_compiler=nop)
    return compiled(*(leaves[place] for place in places))


#: Errors that report a missing fake kernel.
MISSING_FAKE_KERNEL_ERRORS = (UnsupportedOperatorException,)
#: Errors that report a fake kernel that reads data.
DATA_READ_ERRORS = (DataDependentOutputException, GuardOnDataDependentSymNode)


def refuses_aliasing(error: Exception | None) -> bool:
    """Return whether an error is that of a custom op whose output shares memory with an argument."""
    return isinstance(error, RuntimeError) and "may not alias any inputs" in error_text(error)


def range_of_size(size: torch.SymInt) -> tuple[Any, Any]:
    """Return the smallest and largest possible value of a symbolic size."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return bounds.lower, bounds.upper


def expression_of_size(size: torch.SymInt) -> Any:
    """Return the expression of a symbolic size."""
    return size.node.expr


def python_functions_of(op: OpOverload) -> list[Any]:
    """Return the kernels, fake kernel and autograd functions of a custom op that are Python functions."""
    custom = maybe_get_opdef(op)
    if custom is None:
        return []
    found = [custom._init_fn, custom._abstract_fn, custom._backward_fn, custom._setup_context_fn]
    return [function for function in (*found, *custom._backend_fns.values()) if function is not None]


def kernel_for_all_devices(op: OpOverload) -> Callable[..., Any] | None:
    """Return the Python kernel of a custom op that runs on every device, or None if it has others."""
    custom = maybe_get_opdef(op)
    if custom is None or set(custom._backend_fns) != {None}:
        return None
    return custom._backend_fns[None]


def has_vmap_rule(op: OpOverload) -> bool:
    """Return whether an operator defined in Python has a vmap rule."""
    custom = maybe_get_opdef(op)
    return custom is not None and custom._vmap_fn is not None


def has_autograd_formula(op: OpOverload) -> bool:
    """Return whether Python code registered a backward formula for an operator."""
    custom = maybe_get_opdef(op)
    if custom is not None:
        return custom._backward_fn is not None
    name = op_overload_name(op)
    return any(has_kernel(name, k) for k in ("Autograd", "AutogradCPU", "AutogradCUDA"))


# --- opaque arguments ------------------------------------------------------------------------------
register_opaque_type: Callable[..., Any] = (
    getattr(
        _opaque_object, "register_custom_class", None
    )  # its name since 2.15; the older one logs a warning there
    or _opaque_object.register_opaque_type
)
is_opaque_type: Callable[[Any], bool] = getattr(_opaque_object, "is_opaque_type", lambda _: False)
# The name that it had until torch 2.14 warns in 2.15.
is_opaque_constant_type: Callable[[Any], bool] = getattr(
    _opaque_object,
    "is_opaque_constant_type",
    getattr(_opaque_object, "is_opaque_value_type", lambda _: False),
)
