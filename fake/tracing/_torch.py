"""The modules of torch's tracers that acceleration changes names in. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses import functional_tensor
from torch.fx import graph as fx_graph
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree, _traceback

__all__ = [
    "DimDynamic",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "_pytree",
    "_traceback",
    "graph_compile",
    "proxy_tensor",
    "structured_log_is_on",
    "walkers_of_arguments",
]


def walkers_of_arguments() -> list[Any]:
    """The modules whose name ``pytree`` is used to walk arguments of nodes and operators.

    Inductor's is one of them once something has imported Inductor.
    """
    inductor = sys.modules.get("torch._inductor.constant_folding")
    return [fx_graph, functional_tensor, *([] if inductor is None else [inductor])]


def structured_log_is_on() -> bool:
    """Whether graphs and guards are written to torch's structured log."""
    return bool(torch._logging._internal.GET_DTRACE_STRUCTURED or torch._logging._internal.trace_log.handlers)
