"""Effect of each default pass on real models: nodes removed, and its time relative to that of capture.

For ``fuse_scatter_add``, also the step time through Inductor: the backward of tied embeddings with and
without it.
"""

from __future__ import annotations

import argparse
import time
import types
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import fxpasses
from benchmarks._timing import interleaved
from fxpasses.demo.gpt import GPT
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.passes import EliminateDeadCode, default_passes
from tests.models.zoo import ZOO


def effects(console: Console) -> None:
    table = Table(
        title="Nodes that each pass removes from the joint graph, each followed by eliminate_dead_code (decomposed as for Inductor)"
    )
    names = list(dict.fromkeys(item.name for item in default_passes()))
    for heading in ("model", "nodes", *names, "all, in order", "seconds", "of capture"):
        table.add_column(heading, justify="right" if heading != "model" else "left")
    models = {
        "gpt, 6 layers": (GPT(6, 128, 4, 128), (torch.randint(256, (2, 64)), torch.randint(256, (2, 64))))
    }
    models |= {name: (entry.build(), entry.inputs(4)) for name, entry in ZOO.items() if name != "gpt"}
    for name, (model, inputs) in models.items():
        torch._dynamo.reset()
        start = time.perf_counter()
        joint = fxpasses.capture(model, *inputs, decompose=True).joint
        captured = time.perf_counter() - start
        assert joint is not None
        removed = []
        for wanted in names:
            items = [p for p in dict.fromkeys(default_passes()) if p.name == wanted]
            removed.append(_removed(joint, [*items, EliminateDeadCode()])[0])
        together, seconds = _removed(joint, list(default_passes()))
        cells = [str(len(joint.graph.nodes)), *map(str, removed), str(together), f"{seconds:.3f}"]
        table.add_row(name, *cells, f"{seconds / captured:.1%}")
    console.print(table)


def _removed(joint: torch.fx.GraphModule, items: list[fxpasses.Pass]) -> tuple[int, float]:
    gm = copy_graph(joint)
    start = time.perf_counter()
    fxpasses.PassManager(items).run(gm, "joint")
    seconds = time.perf_counter() - start
    return len(joint.graph.nodes) - len(gm.graph.nodes), seconds


def tied_embeddings(console: Console, vocabulary: int, width: int, rounds: int) -> None:
    """Time a training step of tied embeddings with and without the pass (median seconds)."""
    tokens = torch.randint(vocabulary, (4, 32))

    def loss(table: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.embedding(tokens, table))
        return F.cross_entropy((hidden @ table.t()).flatten(0, 1), tokens.flatten())

    torch._dynamo.reset()
    contestants = {}
    for name, passes in (("without", []), ("with", ["fuse_scatter_add", "eliminate_dead_code"])):
        table = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
        step = torch.compile(_own_code(loss), backend="fxpasses", options={"passes": passes}, dynamic=False)

        def run(step: Callable[..., torch.Tensor] = step, table: torch.Tensor = table) -> None:
            table.grad = None
            step(table).backward()

        run()
        contestants[name] = run
    medians = interleaved(contestants, rounds)
    ratio = medians["with"] / medians["without"]
    console.print(
        f"fuse_scatter_add, tied embeddings {vocabulary} x {width}: {medians['without'] * 1e3:.1f} ms without, "
        f"{medians['with'] * 1e3:.1f} ms with ({ratio:.2f} x)"
    )


def _own_code(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a copy with its own code object, because Dynamo stores its compilations there."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks passes", description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    console = Console(width=200)
    torch.manual_seed(0)
    effects(console)
    tied_embeddings(console, arguments.vocabulary, arguments.width, arguments.rounds)
    return 0
