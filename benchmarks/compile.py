"""Compile time of a training step, and its speed once compiled: fxpasses against Inductor, without caches.

Seconds are CPU time, including that of the C++ compilers, which run one after the other. Ratios are medians
over paired runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._timing import interleaved
from fxpasses.demo.gpt import GPT


def step(backend: str, layers: int, dynamic: bool):  # type: ignore[no-untyped-def]
    """Return a training step of a new GPT, which is compiled on its first run."""
    model = GPT(layers, 128, 4, 64, 512)
    tokens, targets = torch.randint(512, (2, 64)), torch.randint(512, (2, 64))

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)

    def run() -> None:
        model.zero_grad()
        compiled(tokens, targets).backward()

    return run


def _cpu() -> float:
    """Return the CPU seconds of this process and of the child processes that it has waited for."""
    return sum(os.times()[:4])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compile", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, help="cold compilations of each contestant")
    parser.add_argument("--shapes", nargs="+", choices=["static", "dynamic"], default=["static", "dynamic"])
    parser.add_argument("--rounds", type=int, default=30, help="steps of each contestant")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"GPT, {arguments.layers} layers, width 128, batch 2 x 64: forward and backward")
    for heading in ("shapes", "what", "inductor", "fxpasses", "ratio"):
        table.add_column(heading, justify="right")
    with (
        torch.compiler.config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
        torch._inductor.config.patch(compile_threads=1),
    ):
        torch.compile(lambda x: x.sin().sum())(torch.ones(3, requires_grad=True)).backward()
        for dynamic in (shapes == "dynamic" for shapes in arguments.shapes):
            compile_seconds: dict[str, list[float]] = {"inductor": [], "fxpasses": []}
            runs = {}
            for _ in range(arguments.repeats):
                torch._dynamo.reset()
                for backend, seconds in compile_seconds.items():
                    runs[backend] = step(backend, arguments.layers, dynamic)
                    start = _cpu()
                    runs[backend]()
                    seconds.append(_cpu() - start)
                    console.log("dynamic" if dynamic else "static", backend, f"{seconds[-1]:.1f} s")
            _row(table, dynamic, "first step (s)", compile_seconds, 1.0)
            steps = interleaved(runs, arguments.rounds, time.process_time)
            _row(table, dynamic, "later step (ms)", {name: [step] for name, step in steps.items()}, 1e3)
    console.print(table)
    return 0


def _row(table: Table, dynamic: bool, what: str, seconds: dict[str, list[float]], unit: float) -> None:
    cells = (f"{statistics.median(values) * unit:.2f}" for values in seconds.values())
    ratio = statistics.median(ours / torchs for torchs, ours in zip(*seconds.values(), strict=True))
    table.add_row("dynamic" if dynamic else "static", what, *cells, f"{ratio:.2f} x")
