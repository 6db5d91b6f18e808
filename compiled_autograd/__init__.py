"""Capture the backward pass as one graph.

``with enable(compiler_fn): loss.backward()`` captures the whole backward pass as one `torch.fx.GraphModule`,
including hooks, custom functions and gradient accumulation. It compiles the graph, caches it for later passes
of the same kind, and always gives the same results as eager. See ``docs/compiled-autograd.md``.
"""

from compiled_autograd import _companions  # noqa: F401  (before anything that imports what it checks)
from compiled_autograd.api import disable, enable, reset, stats
from compiled_autograd.config import Config, config
from compiled_autograd.errors import (
    CompiledAutogradError,
    GraphReloadError,
    InvalidCompilerError,
    LateHookError,
    RefusedError,
    UnboundOperatorError,
)
from compiled_autograd.program.persist import load_graph, save_graph
from compiled_autograd.session.explain import Explanation, explain
from compiled_autograd.session.node_sessions import capture_through
from compiled_autograd.stats import CaptureRecord, FallbackRecord, Stats

__all__ = [
    "CaptureRecord",
    "CompiledAutogradError",
    "Config",
    "Explanation",
    "FallbackRecord",
    "GraphReloadError",
    "InvalidCompilerError",
    "LateHookError",
    "RefusedError",
    "Stats",
    "UnboundOperatorError",
    "capture_through",
    "config",
    "disable",
    "enable",
    "explain",
    "load_graph",
    "reset",
    "save_graph",
    "stats",
]
