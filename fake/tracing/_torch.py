"""The modules of torch's tracers that acceleration changes names in. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import functional_tensor
from torch._subclasses.meta_utils import MetaConverter
from torch.fx import graph as fx_graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from fake.seam.dispatch import (
    DispatchKey,
    DispatchKeySet,
    dispatch_keys,
    is_key_included,
    no_dispatch,
    peek_interpreter_stack,
)
from fake.seam.fake_tensor import FakeTensor as TorchFakeTensor
from fake.seam.logging import log_state

compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` answers; versions without it have no flag that asks for it."""


def structured_log_is_on() -> bool:
    """Whether graphs and guards are written to torch's structured log."""
    return bool(log_state.GET_DTRACE_STRUCTURED or log_state.trace_log.handlers)


def dense_key_sets() -> list[int]:
    """The dispatch keys of ordinary dense tensors on the CPU and on CUDA, as :func:`dispatch_keys` tells them."""
    on_cpu = dispatch_keys(torch.empty(0))
    on_cuda = DispatchKeySet(DispatchKey.CUDA)
    for key in ("ADInplaceOrView", "AutogradCUDA", "AutocastCUDA"):
        on_cuda = on_cuda.add(getattr(DispatchKey, key))
    return [on_cpu.raw_repr(), on_cuda.raw_repr()]


def is_under_transform() -> bool:
    """Whether a functorch transform or functionalization of the dispatcher is on."""
    key = DispatchKey.Functionalize
    return peek_interpreter_stack() is not None or is_key_included(key)
