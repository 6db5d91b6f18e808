"""Private torch names for plans that need neither Dynamo nor Inductor."""

from __future__ import annotations

import ctypes
import inspect
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards as _guards

from fake.seam.autograd_engine import top_saved_tensors_hooks
from fake.seam.dispatch import (
    OPDEFS,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchCustomOpDef,
    dispatch_mode_depth,
    function_mode_depth,
    has_kernel,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    simple_registry,
)
from fake.seam.fake_tensor import is_functional_tensor
from fake.seam.guards import TensorGuards
from fxpasses.plans import native
from fxpasses.plans.errors import NoPlan

nn_kernels = torch._C._nn
PropModule = torch.backends.PropModule
"""The class of torch's modules whose attributes call torch's C++ code."""
unsafe_view = torch.ops.aten._unsafe_view
negative_view = torch._neg_view

CALLS_OF_MODULES = (torch.nn.Module._wrapped_call_impl, torch.nn.Module._call_impl)
"""A bound method of one of these functions is the call of its module."""


def eager_callable(model: Any) -> Callable[..., Any]:
    """A callable that runs a model in Python, even if ``Module.compile`` was used on it."""
    if isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None:
        return model._call_impl
    return model  # type: ignore[no-any-return]


compile_session_context = torch.compiler._compile_session_context  # type: ignore[attr-defined]
"""Within, models in Python take the branches of a trace: ``torch.compiler.is_compiling()`` is true."""
storage_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
"""Where the memory of a tensor begins. Unlike ``data_ptr``, it does not count as a write to the tensor."""


HARDWARE_QUERIES = tuple(
    getattr(torch.cuda, name) for name in ("is_available", "is_initialized", "device_count", "current_device")
)
"""Functions whose results are constants for Dynamo, but differ on other machines."""

TRUSTED_MODULES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "typing_extensions"}) - {"__main__"}
"""Top-level modules whose versions cover the code of their classes."""


def is_trusted(cls: type) -> bool:
    """Whether the version of its package covers what a class does."""
    return cls.__module__.partition(".")[0] in TRUSTED_MODULES and not issubclass(cls, torch.nn.Module)


DICTS_HAVE_VERSIONS = sys.version_info < (3, 12)
"""Whether dictionaries have a version number that changes with each mutation."""


def dictionary_state(values: dict[Any, Any]) -> Any:
    """A value that changes whenever a dictionary does: its version, or its keys and values."""
    if DICTS_HAVE_VERSIONS:
        return _guards.dict_version(values)
    return [*dict.keys(values), *dict.values(values)]


def has_dictionary_state(values: dict[Any, Any], state: Any) -> bool:
    """Whether :func:`dictionary_state` still is ``state``."""
    now = dictionary_state(values)
    if DICTS_HAVE_VERSIONS:
        return bool(now == state)
    return len(now) == len(state) and all(map(operator.is_, now, state))


def operator_name(value: Any) -> str:
    """The name of an operator, or ""."""
    if isinstance(value, TorchCustomOpDef):
        value = value._opoverload
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return str(value)
    return value.name() if isinstance(value, HigherOrderOperator) else ""


_NAMESPACES = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "rngprims",
        "quantized",
        "mkldnn",
        "mkl",
        "onednn",
        "c10d",
        "_c10d_functional",
        "inductor",
        "profiler",
    }
)
"""Namespaces of torch's own operators. What others do, even in their fake kernels and gradient formulas,
belongs to no object of a model."""


def is_operator_of_torch(value: Any) -> bool:
    """Whether the version of torch covers what an operator does."""
    if isinstance(value, HigherOrderOperator):
        return type(value).__module__.startswith("torch.")
    return str(value).partition(".")[0] in _NAMESPACES


def foreign_operators(value: Any) -> list[OpOverload]:
    """The operators that a value stands for, without those of torch."""
    if isinstance(value, TorchCustomOpDef):
        value = value._opoverload
    if isinstance(value, OpOverloadPacket):
        return [one for name in value.overloads() for one in foreign_operators(getattr(value, name))]
    if isinstance(value, HigherOrderOperator) and not is_operator_of_torch(value):
        raise NoPlan("an operator of higher order of another library", value.name())
    return [value] if isinstance(value, OpOverload) and not is_operator_of_torch(value) else []


def find_operator(name: str) -> OpOverload | None:
    """The operator with a name such as ``namespace.operator.overload``, if it is registered."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


class OperatorRegistrations(NamedTuple):
    """What decides how calls of an operator are traced.

    Attributes:
        functions: the Python functions, by role.
        autocast: the dtype that its arguments are cast to.
        watched: objects, and names of attributes that change when something is registered again.
    """

    functions: Mapping[str, Any]
    autocast: str
    watched: Sequence[tuple[Any, Sequence[str]]]


_ROLES = {
    "_abstract_fn": "fake",
    "_setup_context_fn": "setup_context",
    "_backward_fn": "backward",
    "_vmap_fn": "vmap",
}
_UNINSPECTABLE_KEYS = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd", "AutocastCPU")


def operator_registrations(operator: OpOverload) -> OperatorRegistrations | None:
    """The registrations of an operator outside torch, or None if some of its code cannot be inspected."""
    name = operator.name()
    entry, made = simple_registry.singleton.find(name), OPDEFS.get(name)
    others = {key for key in _UNINSPECTABLE_KEYS if has_kernel(name, key)} - (
        {"Autograd", "AutocastCPU"} if made else set()
    )
    if others or entry.effect.effect is not None or operator.py_kernels:
        return None
    if made is None:
        kernel = entry.fake_impl.kernel
        return (
            None
            if kernel is None
            else OperatorRegistrations(
                {"fake": _unwrapped_fake_impl(kernel.func)}, "", [(entry.fake_impl, ("kernel",))]
            )
        )
    if made._torch_dispatch_fns:
        return None
    functions = {role: getattr(made, name) for name, role in _ROLES.items()}
    autocast = repr(vars(made).get("_autocast_dtype"))
    return OperatorRegistrations(functions, autocast, [(made, tuple(_ROLES))])


def _unwrapped_fake_impl(fake: Any) -> Any:
    """Unwrap the user's function. Torch's wrapper notes in its closure whether it was called already."""
    is_wrapper = getattr(fake, "__qualname__", "").startswith("_check_pystubs_once.")
    return inspect.getclosurevars(fake).nonlocals["func"] if is_wrapper else fake


def is_in_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to ``vmap``, ``grad`` or functionalization."""
    return is_functorch_wrapped_tensor(tensor) or is_functional_tensor(tensor)


def tensor_guards(tensors: Sequence[torch.Tensor], grow: Collection[int] = ()) -> Any:
    """A C++ check that tensors have the metadata of these. Those in ``grow`` may have other sizes."""
    sizes: list[list[int | None]] = [[*t.shape] for t in tensors]
    strides: list[list[int | None]] = [[*t.stride()] for t in tensors]
    for i in grow:
        sizes[i] = strides[i] = [None] * tensors[i].dim()
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]


class TensorLayout(NamedTuple):
    """Where torch keeps a tensor's metadata in memory, in words of eight bytes.

    Attributes:
        object: in the Python object, the pointer to the C++ object.
        first: in the C++ object, the start of the metadata: its storage.
        last: the end of the metadata.
        meta: the pointer to autograd's metadata, if there is any.
        storage: in the storage, the pointer to its memory.
        history: in autograd's metadata, the function that made the tensor.
        gradient: there, in the lowest byte, whether it requires grad.
    """

    object: int = 2
    first: int = 2
    last: int = 22
    meta: int = 3
    storage: int = 2
    history: int = 6
    gradient: int = 16

    def is_known(self) -> bool:
        """Whether the running torch has this layout."""
        release = ".".join(torch.__version__.split(".")[:2])
        if release not in ("2.13", "2.14", "2.15") or sys.platform != "linux" or sys.maxsize != 2**63 - 1:
            return False
        word = ctypes.c_uint64.from_address
        tensor = torch.empty_strided((2, 3, 5), (19, 7, 1))
        place, storage = tensor._cdata, tensor.untyped_storage()
        found = [word(place + 8 * i).value for i in range(self.last)]
        return (
            word(id(tensor) + 8 * self.object).value == place
            and found[self.first] == storage._cdata
            and word(storage._cdata + 8 * self.storage).value == storage.data_ptr()
            and [found[7], *found[8:11], *found[13:16]] == [3, 2, 3, 5, 19, 7, 1]
            and found[self.meta] == 0
            and [self._gradient_of(tensor.requires_grad_(flag)) for flag in (True, False)] == [1, 0]
        )

    def _gradient_of(self, tensor: torch.Tensor) -> int:
        meta = ctypes.c_uint64.from_address(tensor._cdata + 8 * self.meta).value
        return ctypes.c_uint8.from_address(meta + 8 * self.gradient).value


TENSOR_LAYOUT = TensorLayout()
MAX_INLINE_DIMENSIONS = 5
"""How many sizes and strides a tensor stores inline. More are stored elsewhere."""

_RECORDING_SETTINGS = (
    "torch._dynamo.config.skip_nnmodule_hook_guards",
    "torch._functorch.config.enable_autograd_cache",
)
"""What recording changes. No plan depends on an extra guard, or on where a result comes from."""


DYNAMIC_SETTINGS = (
    "setting torch._dynamo.config.assume_static_by_default",
    "setting torch._dynamo.config.automatic_dynamic_shapes",
)
"""What ``torch.compile(dynamic=...)`` sets while it compiles. That is a separate factor."""


def changed_settings() -> dict[str, Any]:
    """The settings of Dynamo, Inductor and AOTAutograd that differ from their defaults, if loaded."""
    found = {}
    for name in (
        "torch._dynamo.config",
        "torch._inductor.config",
        "torch._functorch.config",
        "torch.compiler.config",
        "torch.fx.experimental._config",
    ):
        config = sys.modules.get(name)
        if config is not None:
            for key in config._config:  # type: ignore[attr-defined]
                if f"{name}.{key}" not in _RECORDING_SETTINGS and not _is_default(config, key):
                    found[f"{name}.{key}"] = getattr(config, key)
    return found


_LAZY_MODULES = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._export",
    "torch.fx",
    "torch._higher_order_ops",
)


TRACING_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
"""Settings that say that something is being traced."""


def is_imported_with_torch(module: types.ModuleType) -> bool:
    """Whether every process has a module of torch. The settings of compilers are in
    :func:`changed_settings`."""
    name = module.__name__
    return name.partition(".")[0] == "torch" and not name.startswith(_LAZY_MODULES)


def is_lazy_module(value: object) -> bool:
    """Whether a value is a module of torch that ``import torch`` does not import."""
    return (
        isinstance(value, types.ModuleType)
        and value.__name__.partition(".")[0] == "torch"
        and not is_imported_with_torch(value)
    )


def caches_are_disabled() -> bool:
    """Whether a setting of Inductor turns all caches off. If it was set, Inductor is imported."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.force_disable_caches)


def _is_default(config: Any, key: str) -> bool:
    """Whether a setting has its default value. It may have been set and set back."""
    if config._is_default(key):
        return True
    entry = config._config[key]
    default: Any = entry.default
    for given in (entry.env_value_default, entry.env_value_force):
        if type(given) is type(entry.default) or type(given) in (bool, int, float, str):
            default = given
    value = getattr(config, key)
    return type(value) is type(default) and value == default


STANCE_REASON = "a stance of torch.compile's"
_STANCES_THAT_RUN_COMPILED = ("default", "fail_on_recompile", "eager_on_recompile")
"""Stances in which compiled code runs."""


def _is_usual_stance() -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is None or (
        dynamo._stance.stance in _STANCES_THAT_RUN_COMPILED and dynamo._stance.backend is None
    )


def stance_forbids_compiling() -> bool:
    """Whether the current stance compiles nothing."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.stance != "default"


_UNUSUAL: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("a dispatch or function mode is active", (dispatch_mode_depth,), 0),
    ("a dispatch or function mode is active", (function_mode_depth,), 0),
    ("functions of torch are not overridden", (torch._C._is_torch_function_enabled,), True),
    ("inside of a function transform", (peek_interpreter_stack,), None),
    ("hooks on all modules", (torch.nn.modules.module._has_any_global_hook,), {}),
    ("hooks on saved tensors", (top_saved_tensors_hooks, True), None),
    ("anomaly detection", (torch.is_anomaly_enabled,), False),
    ("inside of torch.jit.trace", (torch._C._get_tracing_state,), None),
    (STANCE_REASON, (_is_usual_stance,), True),
)
"""What gives calls of torch an unusual meaning, how to ask for it, and the usual answer."""


def unusual_state() -> str:
    """What gives calls of torch an unusual meaning, or ""."""
    return next((why for why, (ask, *given), usual in _UNUSUAL if ask(*given) != usual), "")


def distributed_process() -> tuple[Any, ...]:
    """The rank, world size and backend of this process. Empty outside a job."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    return distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()


def _world_group_identity() -> tuple[int, ...] | None:
    """Changes if the process leaves or joins a job. Fast, and keeps no process group alive."""
    group = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return None if group is None else (id(group), group.rank(), group.size())


NUMERIC_FLAGS = (
    "autocast on cpu", "autocast on cuda", "autocast's cache", "memory is filled", "mkldnn", "flash attention", "memory-efficient attention",
    "plain attention", "mkldnn is deterministic", "cuDNN", "cuDNN is measured", "cuDNN is deterministic", "precision of float32", "precision of float32 matmuls", "precision of float32 convolutions",
    "precision of float32 recurrent layers",
)  # fmt: skip
"""The names of the values of :func:`numeric_flags`."""


def numeric_flags() -> tuple[Any, ...]:
    """Flags that decide which kernels run and in which precision."""
    return (
        *(
            (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
            for device in ("cpu", "cuda")
        ),
        torch.is_autocast_cache_enabled(),
        *(flag() for flag in _FLAGS),
        *(torch._C._get_fp32_precision_getter(*names) for names in _PRECISIONS),
    )


_FLAGS: tuple[Callable[[], Any], ...] = (
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_mkldnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    getattr(torch._C, "_get_mkldnn_deterministic", lambda: None),
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
)
_PRECISIONS = (("generic", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))


class SameState:
    """A fast check that torch's state is unchanged: torch's guard, and one by one what it does not cover."""

    def __init__(self) -> None:
        queries: list[tuple[Any, ...]] = [*((flag,) for flag in _FLAGS), (torch.is_inference_mode_enabled,)]
        queries += [(torch._C._get_fp32_precision_getter, *names) for names in _PRECISIONS]
        queries += [
            (torch.get_autocast_dtype, device) for device in ("cpu", "cuda")
        ]  # also if autocast is off
        queries.append((_world_group_identity,))
        any_tensor = torch.empty(0)
        keys = tensor_guards([any_tensor])  # checks which dispatch keys are active in the thread
        self._guard = _guards.GlobalStateGuard()
        usual = [*_UNUSUAL, ("", (self._guard.check,), True), ("", (keys.check, any_tensor), True)]
        self._queries = (*queries, *(query for _, query, _ in usual))
        results = [query[0](*query[1:]) for query in queries]
        self._expected = (*results, *(expected for _, _, expected in usual))

    def holds(self) -> bool:
        """Whether the state is unchanged."""
        library = native.library()
        if library is not None:
            return bool(library.unchanged(self._queries, self._expected))
        return all(
            ask(*given) == was for (ask, *given), was in zip(self._queries, self._expected, strict=True)
        )


RootGuardManager = _guards.RootGuardManager
assert_size_stride = _guards.assert_size_stride  # type: ignore[attr-defined]
_ASSERTIONS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


def prelude() -> dict[str, Any]:
    """The names of torch that code generated by Inductor for the CPU uses."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "math": math,
        "inf": float("inf"),
        "nan": float("nan"),
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        **{name: getattr(_guards, name) for name in _ASSERTIONS if hasattr(_guards, name)},
        "empty_strided_cpu": _guards._empty_strided_cpu,  # type: ignore[attr-defined]
        "reinterpret_tensor": _guards._reinterpret_tensor,  # type: ignore[attr-defined]
    }


def kernel_environment() -> None:
    """Tell kernels where torch keeps the data of a tensor. They read it when they are loaded."""
    pointer = str(_guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = pointer


def planned_call(compiled: Any) -> Any:
    """What ``surround_callables`` of ``_torch_entry`` has put around a callable or module from
    ``torch.compile``; else ``compiled``."""
    # `forward` of what torch.compile(module) returns, `_compiled_call_impl` of module.compile()
    for found in (
        compiled,
        getattr(compiled, "_compiled_call_impl", None),
        getattr(compiled, "forward", None),
    ):
        if (call := getattr(found, "planned", None)) is not None:
            return call
    return compiled
