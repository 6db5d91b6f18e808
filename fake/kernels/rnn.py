"""Rules for recurrent layers: those of oneDNN, and the fused GRU cell on GPU."""

from __future__ import annotations

from typing import Any

from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import torch_result

_GRU_WORKSPACE = 5
"""Workspace values per element of the hidden state, for the backward pass of a fused GRU cell (``RNN.cu``).
"""


@rule("aten::_thnn_fused_gru_cell")
def _fused_gru_cell(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the next hidden state and the workspace, both row-major."""
    hidden = args[2]
    rows, width = hidden.shape
    options = {"dtype": hidden.dtype, "device": hidden.device}
    state = fresh(mode, hidden.shape, None, **options)
    return state, fresh(mode, (rows, width * _GRU_WORKSPACE), None, **options)


@rule("aten::mkldnn_rnn_layer_backward")
def _mkldnn_rnn_layer_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return torch's answer, but with separate tensors for the gradients of the two biases, as in eager."""
    *gradients, bias_ih, bias_hh, grad_hx, grad_cx = torch_result(mode, func, args, kwargs)
    if bias_hh is bias_ih:
        bias_hh = fresh(mode, bias_ih.shape, None, dtype=bias_ih.dtype, device=bias_ih.device)
    return (*gradients, bias_ih, bias_hh, grad_hx, grad_cx)
