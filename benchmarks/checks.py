"""Cost of the structure check, relative to the compile time of a first training step.

The default passes run with metadata kept up to date and the structure checked after each pass. Their seconds
are compared with those of the whole first step, with Inductor and (``--compiler eager``) without it, which is
the harder comparison. Inductor's caches are off. ``--values`` adds the slowdown of the first step with values
checked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxpasses
from fxpasses.demo.gpt import GPT
from tests.models.zoo import ZOO


def first_step(
    model: Callable[..., Any], inputs: tuple[Any, ...], compiler: str, dynamic: bool, check: str = "structure"
) -> dict[str, float]:
    """Return the seconds of the first forward and backward pass, and of its stages."""
    torch._dynamo.reset()
    fxpasses.reset_stats()
    compiled = torch.compile(
        model, backend="fxpasses", options={"compiler": compiler, "check": check}, dynamic=dynamic
    )
    start = time.perf_counter()
    with torch.compiler.config.patch(force_disable_caches=True):
        return _step(compiled, inputs, start)


def _step(compiled: Callable[..., Any], inputs: tuple[Any, ...], start: float) -> dict[str, float]:
    results = compiled(*inputs)
    tensors = [
        r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad
    ]
    torch.autograd.backward([t.sum() for t in tensors])
    return {"step": time.perf_counter() - start, **fxpasses.stats().seconds}


def _nodes(model: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
    """Return the size of the joint graph: the calls in the forward and backward graphs."""
    captured = fxpasses.capture(model, *inputs, decompose=True)
    graphs = [g.graph for g in (captured.forward, captured.backward) if g is not None]
    return sum(node.op == "call_function" for graph in graphs for node in graph.nodes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks checks", description=__doc__)
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--models", nargs="*", help="names of models; all by default")
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--values", action="store_true", help="time the value check, too")
    parser.add_argument("--layers", type=int, default=6, help="layers of the GPT")
    arguments = parser.parse_args(argv)
    console = Console(width=120)
    torch.manual_seed(0)
    name = f"gpt, {arguments.layers} layers"
    tokens = tuple(torch.randint(256, (2, 64)) for _ in range(2))
    models: dict[str, Any] = {name: (GPT(arguments.layers, 128, 4, 128), tokens)}
    models |= {key: (entry.build(), entry.inputs(4)) for key, entry in ZOO.items() if key != "gpt"}
    unknown = [
        m for m in arguments.models or () if m not in models and m not in {k.split(",")[0] for k in models}
    ]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(models)}")
    first_step(*next(iter(models.values())), "eager", arguments.dynamic)  # imports of a first compilation
    table = Table(
        title=f"First training step, compiler {arguments.compiler}, {'symbolic' if arguments.dynamic else 'fixed'} sizes"
    )
    headings = ["model", "nodes", "step, s", "passes, s", "of them checks, s", "checks / step"]
    for heading in headings + ["with values / step"] * arguments.values:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for key, (model, inputs) in models.items():
        if arguments.models and key not in arguments.models and key.split(",")[0] not in arguments.models:
            continue
        seconds = first_step(model, inputs, arguments.compiler, arguments.dynamic)
        checks, step = seconds.get("checks", 0.0), seconds["step"]
        passes = seconds.get("passes", 0.0) + checks
        row = [f"{step:.2f}", f"{passes:.3f}", f"{checks:.3f}", f"{checks / step:.1%}"]
        if arguments.values:
            valued = first_step(model, inputs, arguments.compiler, arguments.dynamic, "values")
            row.append(f"{valued['step'] / step:.1f}")
        table.add_row(key, str(_nodes(model, inputs)), *row)
    console.print(table)
    return 0
