"""``torch.fx.experimental.proxy_tensor``: whether ``make_fx`` records, and the numbers of its traces."""

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
    """Whether ``make_fx`` records operators on this thread, before or after autograd."""
    return get_dispatch_mode(_PROXY_KEY) is not None or _PRE_DISPATCH_MODES[0] is not None


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

torchs_build_proxy = proxy_tensor._build_proxy_for_sym_expr
"""Finds the numbers of a trace that make up an expression; with a symbolic number, has it stand for them."""


def is_traced(tracer: Any, expr: sympy.Basic) -> bool:
    """Whether a trace has met an expression."""
    return tracer.sympy_expr_tracker.get(expr) is not None


def trace_two(tracer: Any, kind: type, first: Any, second: Any, out: Any = None) -> Any:
    """The sum or product of two traced numbers, in the trace.

    Args:
        tracer: who traces.
        kind: sympy's ``Add`` or ``Mul``.
        first: a number of the trace.
        second: another.
        out: the symbolic number that the result is, if there is one already.
    """
    combine: Any = proxy_tensor._sympy_handlers()[kind]
    if out is None:
        return combine(first, second)
    proxy_tensor._sym_register(tracer, combine, (first, second), out)
    return out
