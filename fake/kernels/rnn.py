"""Recurrent layers on oneDNN."""

from __future__ import annotations

from typing import Any

from fake.kernels._torch import FakeTensorMode, OpOverload, torchs_answer
from fake.kernels.outputs import fresh
from fake.kernels.registry import Args, Kwargs, rule


@rule("aten::mkldnn_rnn_layer_backward")
def _mkldnn_rnn_layer_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """torch's answer, but the gradients of the two biases are two tensors in eager, not the same one twice."""
    *gradients, bias_ih, bias_hh, grad_hx, grad_cx = torchs_answer(mode, func, args, kwargs)
    if bias_hh is bias_ih:
        bias_hh = fresh(mode, bias_ih.shape, None, dtype=bias_ih.dtype, device=bias_ih.device)
    return (*gradients, bias_ih, bias_hh, grad_hx, grad_cx)
