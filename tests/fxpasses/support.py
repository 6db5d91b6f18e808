"""Small graphs as text, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import Pass, PassManager


def traced(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The ATen graph of ``function``, with fake values, as AOTAutograd would make it."""
    gm = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    (output,) = gm.graph.find_nodes(op="output")
    if not isinstance(output.args[0], (list, tuple)):
        output.args = ((output.args[0],),)
        gm.recompile()
    return gm


def text(gm: fx.GraphModule) -> str:
    """One call a line: ``name = operator(arguments)``."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append("return " + ", ".join(map(str, node.args[0])))
            continue
        if node.op == "get_attr":
            lines.append(f"{node.name} = self.{node.target}")
            continue
        arguments = [str(a) for a in node.args]
        lines.append(f"{node.name} = {node.target}({', '.join(arguments)})")
    return "\n".join(lines)


def run_pass(item: Pass, gm: fx.GraphModule) -> bool:
    """Run one pass with the manager's checks; whether it changed the graph."""
    kind = "inference" if "inference" in item.graphs else "joint"
    (run,) = PassManager([item]).run(gm, kind)
    return run.changed


def assert_same_results(item: Pass, function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """Rewrite ``function``'s graph and compare it with the function itself, bit by bit; returns the graph."""
    gm = traced(function, *inputs)
    run_pass(item, gm)
    wanted = function(*(x.clone() for x in inputs))
    wanted = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    for mine, theirs in zip(gm(*(x.clone() for x in inputs)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert mine.stride() == theirs.stride()
    return gm
