"""What of torch's tracers acceleration and whoever compiles rely on. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import functional_tensor
from torch.fx import graph as fx_graph

from fake.seam.logging import log_state

compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` answers; versions without it have no flag that asks for it."""


def structured_log_is_on() -> bool:
    """Whether graphs and guards are written to torch's structured log."""
    return bool(log_state.GET_DTRACE_STRUCTURED or log_state.trace_log.handlers)
