"""Helpers for tests of library passes: graphs as text files; results and gradients against eager."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

import fxpasses
from fxpasses import Pass, PassManager
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import default_passes
from tests.models.support import assert_agrees

GRAPHS = Path(__file__).parents[2] / "graphs"
GRAPHS_OF = ("2.13", "2.15")
"""The releases of torch that trace the stored graphs, to the letter; others name and order some calls differently."""


def graph_text(gm: fx.GraphModule) -> str:
    """One call a line, with the type of its result; inputs first."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append("return " + ", ".join(map(str, node.args[0])))
            continue
        value = node.meta.get("val")
        kind = f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, Tensor) else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}: {kind}")
            continue
        shown = {
            k: v
            for k, v in node.kwargs.items()
            if k not in ("layout", "pin_memory", "device", "requires_grad")
        }
        arguments = [*map(str, node.args), *(f"{k}={v}" for k, v in shown.items())]
        called = node.target if node.op == "call_function" else f"self.{node.target}"
        called = getattr(called, "__name__", called) if not hasattr(called, "_schema") else called
        lines.append(f"{node.name} = {called}({', '.join(arguments)})" + (f"  # {kind}" if kind else ""))
    return "\n".join(lines)


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """The joint or inference graph of ``function``, decomposed as for Inductor, after the default passes."""
    found = fxpasses.capture(function, *inputs, decompose=True, dynamic=dynamic)
    gm, kind = (found.joint, "joint") if found.joint is not None else (found.forward, "inference")
    assert gm is not None
    PassManager(default_passes()).run(gm, kind)
    return gm


def rewrite(item: Pass, gm: fx.GraphModule) -> bool:
    """Run a pass with the manager's checks; whether it changed anything. Tidies up as the default passes do."""
    kind = "joint" if any(n.name.startswith("tangents") for n in gm.graph.nodes) else "inference"
    (run,) = PassManager([item]).run(gm, kind)
    PassManager(default_passes()).run(gm, kind)
    return run.changed


def assert_golden(item: Pass, function: Callable[..., Any], *inputs: Any, name: str | None = None) -> None:
    """Compare the graph before and after the pass with ``tests/graphs``; with UPDATE_GRAPHS=1, write it there."""
    gm = captured(function, *inputs)
    before = graph_text(gm)
    assert rewrite(item, gm), f"{item.name} does not fire on\n{before}"
    shown = f"# before\n{before}\n\n# after\n{graph_text(gm)}\n"
    path = GRAPHS / f"{name or item.name}.txt"
    if os.environ.get("UPDATE_GRAPHS"):
        path.write_text(shown)
    if torch.__version__.startswith(GRAPHS_OF):
        assert path.read_text() == shown


def assert_left_alone(item: Pass, function: Callable[..., Any], *inputs: Any) -> None:
    """The pass must not change this function's graph."""
    gm = captured(function, *inputs)
    assert not rewrite(item, gm), graph_text(gm)


class Wrapped(torch.nn.Module):
    """A function as a module, with parameters."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = [f"weight_{i}" for i in range(len(parameters))]
        for name, parameter in zip(self.names, parameters, strict=True):
            self.register_parameter(name, torch.nn.Parameter(parameter.detach().clone()))

    def forward(self, *inputs: Any) -> Any:
        weights = [getattr(self, name) for name in self.names]
        return self.function(*inputs, *weights)


def assert_trains(
    item: Pass,
    model: torch.nn.Module,
    *inputs: Any,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.bfloat16),
    backward: bool = True,
    fires: bool = True,
) -> None:
    """Outputs and gradients of the compiled model agree with eager, and the pass took part."""
    for dtype in dtypes:
        torch._dynamo.reset()
        fxpasses.reset_stats()

        def compile(m: torch.nn.Module) -> Callable[..., Any]:
            options = {"passes": ["default", item, "default"], "compiler": "eager"}
            compiled = torch.compile(m, backend=backend, options=options, dynamic=False)
            if backward:
                return compiled
            return torch.no_grad()(compiled)

        assert_agrees(model, compile, [inputs], dtype, backward)
        assert bool(fxpasses.stats().pass_changes.get(item.name)) == fires, f"{item.name}, {dtype}"
