"""Fake tensors whose value is known during tracing: how they arise, propagate and become unknown.

In the mode, ``torch.tensor(3.)`` returns a fake tensor that carries its value, so that ``item()`` can return
it. The value is kept while every write to it can be evaluated. The first write that cannot be (``random_``)
makes the tensor and all its aliases unknown.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.cache.calls import LIFT_OPS
from fake.seam.dispatch import OpOverload, get_default_device, no_dispatch
from fake.seam.fake_tensor import get_schema_info, is_sparse_any, should_allow_numbers_as_tensors
from fake.seam.fx import normalize_function
from fake.seam.proxy_tensor import is_tracing
from fake.seam.pytree import tree_leaves, tree_map_only, tree_unflatten

MAX_ELEMENTS = 1
"""Constants are scalars: with larger values, a trace would hold data."""

_aten = torch.ops.aten
MAX_SCHEDULE_LENGTH = 64
"""A ``linspace`` up to this long is a constant, too: models read numbers from schedules while being built."""


def may_be_constant(mode: Any, tensor: torch.Tensor) -> bool:
    """Return whether a real tensor is small and plain enough to be carried along as a constant."""
    return (
        tensor.numel() <= MAX_ELEMENTS
        and not is_sparse_any(tensor)
        and not mode.is_our_fake(tensor)
        and tensor.device.type != "meta"
    )


def lift_constants(mode: Any, call: Any) -> Any:
    """Compute ``torch.tensor(value)`` and operators on numbers alone for real, and keep the value.

    Returns:
        A fake tensor, or ``NotImplemented`` if the call is neither.
    """
    func = call.func
    if func is _aten.linspace.default:
        return _fold_linspace(mode, call)
    is_lift = func in LIFT_OPS
    numbers_only = (
        not is_lift
        and isinstance(func, OpOverload)
        and should_allow_numbers_as_tensors(func)
        and not call.has_symbols
        and not _skips_constants(mode, call)
    )
    if call.fakes or not (is_lift or numbers_only):
        return NotImplemented
    value = func(*call.args, **call.kwargs)
    if type(value) is torch.Tensor and may_be_constant(mode, value):
        with no_dispatch():  # safe for exactly torch.Tensor, not for wrapper subclasses
            value = value.clone()
        return mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True)
    if is_lift and type(call.args[0]) is torch.Tensor:
        return mode.fake_tensor_converter.from_real_tensor(mode, call.args[0])
    return NotImplemented


def _fold_linspace(mode: Any, call: Any) -> Any:
    """Compute a short ``linspace`` between numbers on the CPU, outside of traces: its elements are known."""
    steps = call.args[2] if len(call.args) > 2 else call.kwargs["steps"]
    device = torch.device(call.kwargs.get("device") or get_default_device())
    if call.has_symbols or steps > MAX_SCHEDULE_LENGTH or device.type != "cpu" or is_tracing():
        return NotImplemented
    value = call.func(*call.args, **call.kwargs)
    return mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True)


def _moves_to_missing_device(mode: Any, call: Any) -> bool:
    """Return whether the call moves a tensor to a device that is not there: the move must not touch it."""
    if not mode.avoid_device_init:
        return False
    if call.func is torch.ops.prims.device_put.default:
        return True
    device = call.kwargs.get("device")
    return call.func is _aten._to_copy.default and device is not None and device.type != "cpu"


def _skips_constants(mode: Any, call: Any) -> bool:
    from_meta = (
        call.func is _aten._to_copy.default
        and isinstance(call.args[0], torch.Tensor)
        and call.args[0].device.type == "meta"
    )
    return from_meta or _moves_to_missing_device(mode, call)


def fold_constants(mode: Any, call: Any) -> Any:
    """Evaluate an operator whose tensor arguments are all constants.

    Returns:
        Constant fake tensors, or ``NotImplemented`` if some value is unknown or becomes unknown.
    """
    func = call.func
    if (
        not call.fakes
        or not isinstance(func, OpOverload)
        or torch.Tag.nondeterministic_seeded in func.tags
        # an in-place view would change the sizes of the constant but not those of the fake tensor
        or (torch.Tag.inplace_view in func.tags and func is not _aten.detach_.default)
        or any(tensor.constant is None for tensor in call.fakes)
        or call.has_symbols
        or _moves_to_missing_device(mode, call)
        or func is _aten._nested_tensor_from_tensor_list.default
    ):
        return NotImplemented
    values = [a.constant if mode.is_our_fake(a) else a for a in call.flat]
    args, kwargs = tree_unflatten(values, call.spec)
    with no_dispatch():
        result = func(*args, **kwargs)
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    converter = mode.fake_tensor_converter
    if all(may_be_constant(mode, t) for t in tensors):
        return tree_map_only(
            torch.Tensor, lambda t: converter.from_real_tensor(mode, t, make_constant=True), result
        )
    for tensor in tensors:
        converter.invalidate_constant_aliases(tensor)
    return NotImplemented


def invalidate_written(mode: Any, call: Any) -> None:
    """Invalidate the constants that the operator writes to."""
    if not any(tensor.constant is not None for tensor in call.fakes):
        return
    schema = get_schema_info(call.func)
    if not schema.is_mutable():
        return
    normalized: Any = normalize_function(
        call.func, args=call.args, kwargs=call.kwargs, normalize_to_only_use_kwargs=True
    )
    for name, value in normalized.kwargs.items():
        name = "self" if name == "input" and not schema.has_argument(name) else name
        if mode.is_our_fake(value) and schema.is_mutable(name) and value.constant is not None:
            mode.fake_tensor_converter.invalidate_constant_aliases(value.constant)
