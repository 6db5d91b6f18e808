"""Operators, and the dispatcher that calls them: its keys, modes, and the kernels that torch has in Python."""

from __future__ import annotations

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _DisableAutocast as DisableAutocast,
    _dispatch_has_kernel_for_dispatch_key as has_kernel,
    _dispatch_keys as dispatch_keys,
    _dispatch_tls_is_dispatch_key_excluded as is_key_excluded,
    _dispatch_tls_is_dispatch_key_included as is_key_included,
    _get_dispatch_mode as get_dispatch_mode,
    _has_storage as has_storage,
    _is_any_autocast_enabled as is_any_autocast_enabled,
    _len_torch_dispatch_stack as dispatch_mode_depth,
    _len_torch_function_stack as function_mode_depth,
    _set_grad_enabled as set_grad_enabled,
    _TorchDispatchModeKey as TorchDispatchModeKey,
)
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._decomp import decomposition_table, meta_table
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes as disable_current_modes

collectives = torch.ops._c10d_functional
"""The operators of functional collectives."""
check = torch._check
"""``check(condition, message)``: raises eager's ``RuntimeError`` where a condition does not hold."""


def onednn_linear(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``a @ weight.t()``, and ``bias`` added to each row, by oneDNN. Looked up when it runs: there are builds without it.

    Args:
        a: float32[rows, inner].
        weight: float32[columns, inner], with any strides.
        bias: float32[columns], or None.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a, weight, bias, "none", [], "")
    return result
