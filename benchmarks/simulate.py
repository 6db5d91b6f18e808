"""Simulated against measured steps: models unknown to the simulator, on two processes over a slow network.

``python -m benchmarks simulate [MODEL...]``. Each model runs with and without passes over collectives. Graphs
run call by call in eager, as the simulation counts them. Times are CPU seconds of the calling thread plus its
waits for messages (:mod:`benchmarks._virtual_network`), so that load on the machine matters little. Each
round measures the step and then the seconds of its calls; the simulation uses the latter (medians over
rounds). ``--wall`` uses wall time and a network that really waits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._slow_network import BANDWIDTH, LATENCY, init_slow_process_group
from benchmarks._transformers import build
from benchmarks._virtual_network import VirtualClock, init_virtual_process_group
from fxpasses.distributed import shard
from fxpasses.distributed.capture import capture_rank
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.simulate import measure, simulate, with_passes
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes.registry import available_passes

_SETTINGS: dict[str, list[str]] = {
    "as captured": [],
    "overlap": ["overlap_collectives"],
    "one bucket": ["bucket_collectives"],
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


class _Blocks(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks, self.norm = nn.ModuleList(_Block(width) for _ in range(layers)), nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _UNet(nn.Module):
    """A U-Net: convolutions down and up, with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(sizes))
        self.same = nn.ModuleList(nn.Conv2d(size, size, 3, padding=1) for size in sizes[1:])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * b, a, 2, 2) for a, b in pairwise(sizes))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for down, same in zip(self.down, self.same, strict=True):
            x = nn.functional.relu(same(down(x).relu()))
            seen.append(x)
        for up in reversed(self.up):
            x = up(torch.cat([x, seen.pop()], 1))
        return x


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs).square().mean()


_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "n_layer": 3, "vocab_size": 1024, "n_positions": 128},  # tied embeddings
    "vit": {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3},
    "mixtral": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
}
_MODELS = ("blocks", "unet", *_SIZES)


def _make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if name == "blocks":
        return _Loss(_Blocks(4, 256)), (torch.zeros(2, 128, dtype=torch.long),)
    if name == "unet":
        return _Loss(_UNet(48)), (torch.ones(4, 3, 32, 32),)
    built = build(name, "sdpa", batch=4, length=64, training=False, **{"max_position_embeddings": 128, **_SIZES[name]} if name == "mixtral" else _SIZES[name])  # fmt: skip
    return _Loss(built.model), built.inputs


def _run(rank: int, folder: str, name: str, rounds: int, wall: bool) -> None:
    torch.set_num_threads(1)
    make = partial(_make, name)
    captured, groups = capture_rank(make, {"dp": 2})
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    (init_slow_process_group if wall else init_virtual_process_group)(store, rank, 2)
    now: Callable[[], float] = time.perf_counter if wall else VirtualClock.now
    mesh = init_device_mesh("cpu", (2,))
    steps: dict[str, Any] = {}
    for setting, passes in _SETTINGS.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, inputs = make()
        shard(model, mesh)
        options = {"passes": ["default", *passes], "compiler": "eager", "regions": "off", "ranks": "off"}
        call = torch.compile(model, backend="fxpasses", options=options, dynamic=False)
        call(*inputs).backward()
        changed = with_passes(captured, [parse_pass(item, available_passes()) for item in passes])
        steps[setting] = model, call, inputs, changed, [], []
    for _ in range(rounds):
        for model, call, inputs, changed, taken, calls in steps.values():
            model.zero_grad()  # keep gradient accumulation out of the step
            dist.barrier()
            VirtualClock.begin()
            start = now()
            call(*inputs).backward()
            taken.append(now() - start)
            calls.append(measure(changed, 1, time.perf_counter if wall else time.thread_time))
    if rank == 0:
        cluster = Cluster(local=1, latency=LATENCY, bandwidth=BANDWIDTH)
        for setting, (*_, changed, taken, calls) in steps.items():
            seconds = {key: statistics.median(one[key] for one in calls) for key in calls[0]}
            start = time.thread_time()
            found, median = simulate(changed, cluster, groups, seconds), statistics.median(taken)
            print(
                f"{name}, {setting}: {found.messages} messages, predicted {found.seconds * 1e3:.0f} ms, measured {median * 1e3:.0f} ms, "
                f"error {found.seconds / median - 1:+.1%} (waited {found.exposed * 1e3:.0f}); in {time.thread_time() - start:.2f} s", flush=True
            )  # fmt: skip
    dist.barrier()
    os._exit(0)  # destructors of process groups may wait for threads that need the GIL


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(_MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true", help="wall time, and a network that really waits")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.models if name not in _MODELS]:
        parser.error(f"there is no model {unknown[0]!r}; choose from {', '.join(_MODELS)}")
    context = multiprocessing.get_context("spawn")
    for name in arguments.models or _MODELS:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_run, args=(rank, folder, name, arguments.rounds, arguments.wall))
                for rank in (0, 1)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                return 1
    return 0
