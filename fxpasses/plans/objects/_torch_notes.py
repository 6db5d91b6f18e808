"""Private torch names of Dynamo's marks on tensors, modules and functions, and of the callables it makes."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any

import torch

from fxpasses.plans._torch import CALLS_OF_MODULES

PROPAGATED = "_dynamo_propagated_dynamic_indices"
"""AOTAutograd's hint on tensors that graphs of symbolic sizes return or save. Dynamo never guards on it."""

MARKS = (
    PROPAGATED,
    "_dynamo_static_input_type",
    "_is_torch_compile",
    "_compiled_call_impl",
    "_torchdynamo_wrapper_id",
    "__dynamo_disable",
)
"""What Dynamo writes on buffers and modules that it has compiled, and on functions that it must not trace."""


def is_mark(name: str, values: Mapping[Any, Any]) -> bool:
    """Whether an attribute of an object says only that Dynamo has compiled the object."""
    value = values[name]
    if name == "_compiled_call_impl":  # by ``Module.compile``: of its own call
        original = getattr(value, "_torchdynamo_orig_callable", None)
        code = getattr(original, "__code__", None)
        if code is not None and code.co_filename.endswith("torch/_dynamo/external_utils.py"):
            original = getattr(original, "__wrapped__", None)  # from 2.15 on
        call, owner = getattr(original, "__func__", None), getattr(original, "__self__", None)
        return call in CALLS_OF_MODULES and vars(owner) is values
    if name == "__dynamo_disable":  # the function itself, by its first call: of ``checkpoint``, say
        original = getattr(value, "_torchdynamo_orig_callable", None)
        return getattr(original, "__dict__", {}).get(name) is value
    return (
        name == PROPAGATED
        or value is True
        or value
        in ("unguarded", "guarded")  # depends on where it was compiled: in a model, or in an optimizer's step
        or (name == "_torchdynamo_wrapper_id" and type(value) is int)
    )


def original_callable(value: Any) -> Any:
    """What ``torch.compile`` or ``fxpasses.compile`` made a callable of, which is traced where it is called.
    None for other callables."""
    kind = type(value)
    if kind.__module__ == "fxpasses.plans.compile":
        return value.model
    if kind.__module__ == "torch._dynamo.eval_frame" and kind.__name__ == "OptimizedModule":
        return value._orig_mod
    known = vars(value) if kind is types.FunctionType else {}
    return None if "_torchdynamo_disable" in known else known.get("_torchdynamo_orig_callable")


_MARKED_SIZES = ("_dynamo_dynamic_indices", "_dynamo_static_indices", "_dynamo_weak_dynamic_indices")
_MARK_DETAILS = ("_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on")
_MARKING_ATTRIBUTES = frozenset({*_MARKED_SIZES, *_MARK_DETAILS, PROPAGATED, "_has_dynamo_dim_marking"})


def dynamic_marks(tensor: torch.Tensor) -> tuple[tuple[str, str], ...] | None:
    """What ``mark_dynamic``, ``maybe_mark_dynamic`` and ``mark_static`` say about a tensor's sizes, as text.

    ``None`` if the tensor has other attributes, of which nothing is known, or if the marks say more than
    which sizes.
    """
    attributes = tensor.__dict__
    if not attributes:
        return ()
    ranges, hints, values = (attributes.get(name, {}) for name in _MARK_DETAILS)
    ranged = any(of.min is not None or of.max is not None for of in ranges)
    others = [
        name
        for name in attributes.keys() - _MARKING_ATTRIBUTES
        if name not in MARKS or not is_mark(name, attributes)
    ]
    if others or ranged or hints or any(values.values()):
        return None
    return tuple((name, str(sorted(attributes[name]))) for name in _MARKED_SIZES if name in attributes)


_DISABLED_MESSAGES = re.compile(
    r"optimizer .* (_init_group|step) not supported|don't trace into fused optimizer|tracing into (TorchScript|FX) not fully supported"
)


def is_disabled_copy(cls: type, name: str, value: Any) -> bool:
    """Whether a class attribute is an inherited function that Dynamo disabled on its first compilation."""
    inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
    return (
        is_disabled_by_dynamo(value)
        and inherited is not None
        and _before_disabling(value) is _before_disabling(inherited)
    )


def _before_disabling(value: Any) -> Any:
    return value.__wrapped__ if is_disabled_by_dynamo(value) else value


def is_disabled_by_dynamo(value: Any) -> bool:
    """Whether it is a function of torch that Dynamo disables when it first compiles in a process."""
    return bool(_DISABLED_MESSAGES.fullmatch(str(getattr(value, "_torchdynamo_disable_msg", ""))))


def is_fsdp_hook_state(value: object) -> bool:
    """Whether it belongs to the hooks of FSDP2, which run in eager too.

    Modules do not, although FSDP2 gives them classes of its own.
    """
    hooks = type(value).__module__.startswith("torch.distributed.fsdp._fully_shard")
    return hooks and not isinstance(value, torch.nn.Module)


def is_composable_api_key(key: object) -> bool:
    """Whether an entry is where ``fully_shard`` and the like keep state of a module. Its name differs by
    process, and only their hooks read it."""
    return type(key) is str and key.startswith("__composable_api_")
