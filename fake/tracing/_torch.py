"""The modules of torch's tracers that acceleration changes names in. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import functional_tensor
from torch._subclasses.fake_tensor import FakeTensor as TorchFakeTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch._subclasses.meta_utils import MetaConverter
from torch.fx import graph as fx_graph
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree, _traceback
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "WALKERS_OF_ARGUMENTS",
    "DimDynamic",
    "FunctionalTensorMode",
    "MetaConverter",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TorchFakeTensor",
    "_pytree",
    "_traceback",
    "compile_lock",
    "compile_session",
    "dense_key_sets",
    "dispatch_keys",
    "graph_compile",
    "is_under_transform",
    "no_dispatch",
    "proxy_tensor",
    "structured_log_is_on",
]

compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` answers; versions without it have no flag that asks for it."""


WALKERS_OF_ARGUMENTS = (fx_graph, functional_tensor, "torch._inductor.constant_folding")
"""The modules whose name ``pytree`` is used to walk arguments of nodes and operators; Inductor's, once something imports it."""


def structured_log_is_on() -> bool:
    """Whether graphs and guards are written to torch's structured log."""
    return bool(torch._logging._internal.GET_DTRACE_STRUCTURED or torch._logging._internal.trace_log.handlers)


dispatch_keys = torch._C._dispatch_keys


def dense_key_sets() -> list[int]:
    """The dispatch keys of ordinary dense tensors on the CPU and on CUDA, as :func:`dispatch_keys` tells them."""
    on_cpu = dispatch_keys(torch.empty(0))
    on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for key in ("ADInplaceOrView", "AutogradCUDA", "AutocastCUDA"):
        on_cuda = on_cuda.add(getattr(torch._C.DispatchKey, key))
    return [on_cpu.raw_repr(), on_cuda.raw_repr()]


def is_under_transform() -> bool:
    """Whether a functorch transform or functionalization of the dispatcher is on."""
    key = torch._C.DispatchKey.Functionalize
    return peek_interpreter_stack() is not None or torch._C._dispatch_tls_is_dispatch_key_included(key)
