"""What of torch's tracers acceleration and whoever compiles rely on. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses import functional_tensor
from torch.fx import graph as fx_graph

compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` answers; versions without it have no flag that asks for it."""
