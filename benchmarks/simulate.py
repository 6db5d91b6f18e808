"""Steps on paper against steps on two processes: a model with sharded parameters over a slow network, with and without passes over collectives.

``python -m benchmarks simulate``. Graphs run call by call in eager, as the simulation counts them. ``measured`` is the median of the steps of both ranks in
turns; ``simulated`` takes the seconds of each call from a run of one process of the two alone, beside an idle one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._slow_network import BANDWIDTH, LATENCY, init_slow_process_group
from fxpasses.distributed import shard
from fxpasses.distributed.capture import capture_rank
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.simulate import measure, simulate, with_passes
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes.registry import available_passes

_SETTINGS: dict[str, list[str]] = {
    "as captured": [],
    "overlap": ["overlap_collectives"],
    "buckets of 25 MiB": ["bucket_collectives"],
    "buckets of 3 MB": ["bucket_collectives{max_bytes=3000000}"],
    "buckets of 3 MB, 6 MB ahead": [
        "bucket_collectives{max_bytes=3000000}",
        "overlap_collectives{max_bytes=6000000}",
    ],
}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm_1(x)
        q, k, v = (f(y).view(batch, length, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class _Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks, self.norm = nn.ModuleList(_Block(width) for _ in range(layers)), nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def _make() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return _Model(4, 256), (torch.zeros(2, 128, dtype=torch.long),)


def _run(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    steps: dict[str, list[float]] = {name: [] for name in _SETTINGS}
    init_slow_process_group(dist.FileStore(str(Path(folder) / "store"), 2), rank, 2)
    calls: dict[str, Any] = {}
    for name, passes in _SETTINGS.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, inputs = _make()
        options = {"passes": ["default", *passes], "compiler": "eager", "regions": "off", "ranks": "off"}
        shard(model, init_device_mesh("cpu", (2,)))
        calls[name] = model, torch.compile(model, backend="fxpasses", options=options), inputs
        calls[name][1](*inputs).backward()
    for _ in range(rounds):
        for name, (model, call, inputs) in calls.items():
            model.zero_grad()  # sums of gradients are none of the step's
            dist.barrier()
            start = time.perf_counter()
            call(*inputs).backward()
            steps[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "steps").write_text("\n".join(str(statistics.median(taken)) for taken in steps.values()))
    dist.barrier()
    os._exit(0)  # destructors of process groups may wait for threads that want the GIL


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_run, args=(rank, folder, arguments.rounds)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            return 1
        measured = [float(line) for line in Path(folder, "steps").read_text().split()]
    cluster = Cluster(local=1, latency=LATENCY, bandwidth=BANDWIDTH)
    captured, groups = capture_rank(_make, {"dp": 2})
    for (name, passes), seconds in zip(_SETTINGS.items(), measured, strict=True):
        changed = with_passes(captured, [parse_pass(item, available_passes()) for item in passes])
        start = time.perf_counter()
        found = simulate(changed, cluster, groups, measure(changed, arguments.rounds))
        taken = time.perf_counter() - start
        print(
            f"{name}: {found.messages} messages, measured {seconds * 1e3:.0f} ms, simulated {found.seconds * 1e3:.0f} ms "
            f"({found.seconds / seconds - 1:+.0%}; waited {found.exposed * 1e3:.0f}); in {taken:.2f} s", flush=True
        )  # fmt: skip
    return 0
