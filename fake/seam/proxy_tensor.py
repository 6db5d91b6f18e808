"""``torch.fx.experimental.proxy_tensor``: whether ``make_fx`` is recording, and the numbers in its traces."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor

from fake.seam.dispatch import (
    DispatchKey,
    TorchDispatchModeKey,
    dispatch_keys,
    get_dispatch_mode,
    is_key_included,
    throw_on_data_ptr,
)
from fake.seam.fake_tensor import FunctionalTensor
from fake.seam.logging import log_state

_PROXY_KEY = TorchDispatchModeKey.PROXY
_PRE_DISPATCH_STATE = torch._ops._mode_stack_state_for_pre_dispatch
_PRE_DISPATCH_MODES = vars(_PRE_DISPATCH_STATE).get("_ModeStackStateForPreDispatch__infra_modes") or [None]


def is_tracing() -> bool:
    """Return whether ``make_fx`` records operators on this thread, before or after autograd."""
    return get_dispatch_mode(_PROXY_KEY) is not None or _PRE_DISPATCH_MODES[0] is not None


def make_symbolic_functional(cls: type, elem: torch.Tensor) -> torch.Tensor:
    """Do what ``FunctionalTensor.__new__`` does for a functional tensor with symbolic
    sizes outside inference mode."""
    _force_proxies(elem)
    extra = FunctionalTensor._extra_dispatch_keys & dispatch_keys(elem)
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, elem.shape, elem.stride(), elem.storage_offset(), None, elem.dtype, elem.layout, elem.device,
        False, elem.requires_grad, None, False, False, extra, elem.untyped_storage().nbytes(),
    )  # fmt: skip
    throw_on_data_ptr(made)
    made.elem = elem
    return made


_STORAGE_SIZE_IS_GIVEN = "storage_size" in FunctionalTensor.__new__.__code__.co_varnames
"""Whether torch computes nothing there either (2.15 and later)."""


def _force_proxies(elem: torch.Tensor) -> None:
    """Put a tensor's sizes and strides into the trace that records arithmetic, in the order in which torch
    meets them when it computes the size of a storage: from there on they are in the graph."""
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
    """Return whether ``make_fx`` is tracing."""
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def nodes_are_observable() -> bool:
    """Return whether the node of a symbolic number may be observed: by a trace, or under functionalization,
    whose values may become inputs of a trace."""
    return is_tracing_graph() or is_key_included(_FUNCTIONALIZE)


_FUNCTIONALIZE = DispatchKey.Functionalize


def is_symbolic_arithmetic_recorded() -> bool:
    """Return whether ``make_fx`` or the structured log records symbolic arithmetic."""
    return (
        get_dispatch_mode(_PROXY_KEY) is not None
        or _PRE_DISPATCH_MODES[0] is not None
        or log_state.GET_DTRACE_STRUCTURED
    )


arithmetic_watchers = (get_dispatch_mode, _PROXY_KEY, _PRE_DISPATCH_MODES, log_state)
"""The parts of that check, for code in which a function call is too expensive."""

build_proxy_for_sym_expr = proxy_tensor._build_proxy_for_sym_expr
"""Finds the traced numbers that make up an expression; given a symbolic number,
makes the result its proxy."""


def is_traced(tracer: Any, expr: sympy.Basic) -> bool:
    """Return whether a trace has seen an expression."""
    return tracer.sympy_expr_tracker.get(expr) is not None


def trace_binary(tracer: Any, kind: type, first: Any, second: Any, out: Any = None) -> Any:
    """Return the sum or product of two traced numbers, in the trace.

    Args:
        tracer: the tracer.
        kind: sympy's ``Add`` or ``Mul``.
        first: a number of the trace.
        second: another number of the trace.
        out: the symbolic number that is the result, if there already is one.
    """
    combine: Any = proxy_tensor._sympy_handlers()[kind]
    if out is None:
        return combine(first, second)
    proxy_tensor._sym_register(tracer, combine, (first, second), out)
    return out
