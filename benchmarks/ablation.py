"""What each change to torch gains: cold compilations without one group of ledger entries, against all.

A group consists of the entries with the same loss (``Entry.lost``). Trials take turns in one process. Seconds
are those of this process alone: C++ compilers are left out, since their results are cached. Each trial clears
the state of Dynamo, AOTAutograd, Inductor and the dispatch caches. A group that gains less than 2% on every
model is not worth its code. "answers" tells whether loss and gradients of the first step are unchanged.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fake
from benchmarks._transformers import NAMES, Built, build
from fake.acceleration import engine
from fake.seam.patches import LEDGER, Entry, When

__all__ = ["main"]

_DURING = (When.COMPILATION, When.MODE_OR_COMPILATION)


def groups(pattern: str = "") -> dict[str, tuple[Entry, ...]]:
    """Return the entries that are in force during compilation, grouped by what is lost without them.

    >>> sorted({entry.when.name for entries in groups().values() for entry in entries})
    ['COMPILATION', 'MODE_OR_COMPILATION']
    """
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in LEDGER.entries:
        if entry.when in _DURING and re.search(pattern, entry.lost):
            found[entry.lost].append(entry)
    return {lost: tuple(entries) for lost, entries in found.items()}


def cold(built: Built, dynamic: bool) -> tuple[float, list[Tensor]]:
    """Run a first training step. Return its CPU seconds, and its loss and gradients."""
    torch._dynamo.reset()
    fake.cache_clear()
    engine().clear()
    built.model.zero_grad()
    torch.manual_seed(0)
    compiled = torch.compile(built.model, backend="fxpasses", dynamic=dynamic)
    start = time.process_time()
    loss = compiled(*built.inputs).float().square().mean()
    loss.backward()
    seconds = time.process_time() - start
    grads = [p.grad for p in built.model.parameters() if p.grad is not None]
    return seconds, [loss.detach(), *(grad.clone() for grad in grads)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ablation", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["mistral", "t5", "mobilenet_v2"])
    parser.add_argument("--layers", type=int, default=4, help="of models that have layers")
    parser.add_argument("--shapes", nargs="+", choices=["static", "dynamic"], default=["static", "dynamic"])
    parser.add_argument(
        "--rounds", type=int, default=5, help="trials of each group, each beside one with all"
    )
    parser.add_argument("--group", default="", help="a regular expression: groups whose loss it is found in")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(width=150)
    cases = [(name, shapes) for name in arguments.models for shapes in arguments.shapes]
    rows: dict[str, list[str]] = defaultdict(list)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for name, shapes in cases:
            torch.manual_seed(0)
            layered = {"num_hidden_layers": arguments.layers} if name not in _WITHOUT_LAYERS else {}
            built = build(name, training=False, **layered)
            cold(built, shapes == "dynamic")
            wanted = groups(arguments.group)
            for lost, entries in wanted.items():
                rows[lost].append(_compared(built, shapes == "dynamic", entries, arguments.rounds))
                console.log(name, shapes, lost, rows[lost][-1])
    table = Table("without it is lost", "entries", *(f"{name} {shapes}" for name, shapes in cases))
    for lost, cells in rows.items():
        table.add_row(lost, str(len(wanted[lost])), *cells)
    console.print(table)
    return 0


_WITHOUT_LAYERS = ("convnext", "resnet", "mobilenet_v2", "poolformer", "t5", "bart", "gpt2", "gptj", "gpt_neo", "distilbert", "bloom")  # fmt: skip


def _compared(built: Built, dynamic: bool, entries: Sequence[Entry], rounds: int) -> str:
    """Return how much slower a cold compilation is without some entries (with quartiles), or what breaks."""
    ratios = []
    for number in range(rounds):
        found = {}
        for without in (True, False) if number % 2 else (False, True):
            try:
                with LEDGER.without(*(entries if without else ())):
                    found[without] = cold(built, dynamic)
            except Exception as error:
                if not without:
                    raise
                return f"{type(error).__name__}"
        ratios.append(found[True][0] / found[False][0])
        if not _same(found[True][1], found[False][1]):
            return "other answers"
    ratios.sort()
    return f"{100 * (statistics.median(ratios) - 1):+.1f}% ({100 * (ratios[rounds // 4] - 1):+.0f} to {100 * (ratios[-1 - rounds // 4] - 1):+.0f})"


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, theirs, strict=True)
    )
