"""Gain of ``bucket_collectives``: training of transformers models on two processes, gradients averaged.

Each process runs forward and backward, then averages the gradients of all parameters in a function that is
compiled with and without the pass. ``step`` is the median wall time of a whole step with the pass over that
without it, in turns. ``reduce`` is the same for the averaging alone. ``Inductor's`` is the same for
Inductor's own bucketing, which is off by default.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from benchmarks._timing import interleaved
from benchmarks._transformers import build
from fxpasses.backend import fxpasses as backend

_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024},
    "llama": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
    "vit": {"num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 768},
    "mobilenet_v2": {},
}


def _average(*gradients: Tensor) -> list[Tensor]:
    return [collectives.all_reduce(gradient, "avg", dist.group.WORLD) for gradient in gradients]


def _run(rank: int, name: str, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    attention = "eager" if name == "mobilenet_v2" else "sdpa"  # it has none
    built = build(name, attention, length=32, **_SIZES[name])
    parameters = [p for p in built.model.parameters() if p.requires_grad]

    def backward() -> list[Tensor]:
        built.model.zero_grad()
        built.model(*built.inputs).pow(2).mean().backward()
        return [p.grad for p in parameters if p.grad is not None]

    contestants: dict[str, Callable[[], object]] = {}
    gradients = backward()
    for label, passes, inductor in (
        ("without", ["default"], {}),
        ("with", ["default", "bucket_collectives", "default"], {}),
        ("Inductor's", ["default"], {"bucket_all_reduces_fx": "all"}),
    ):
        torch._dynamo.reset()
        options = {"passes": passes, "inductor": inductor}
        average = torch.compile(
            lambda *tensors: _average(*tensors), backend=backend, options=options, dynamic=False
        )
        contestants[f"reduce {label}"] = lambda average=average: average(*gradients)
        contestants[f"step {label}"] = lambda average=average: average(*backward())
        contestants[f"reduce {label}"]()
    medians = interleaved(contestants, rounds)
    if rank == 0:
        for label in ("with", "Inductor's"):
            step, reduce = (
                medians[f"{kind} {label}"] / medians[f"{kind} without"] for kind in ("step", "reduce")
            )
            print(
                f"{name}, {len(gradients)} gradients, {label}: step {step:.2f} of {medians['step without'] * 1e3:.1f} ms, "
                f"reduce {reduce:.2f} of {medians['reduce without'] * 1e3:.1f} ms", flush=True,
            )  # fmt: skip
    dist.barrier()
    os._exit(0)  # destructors of process groups may wait for threads that need the GIL


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks collectives", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *_SIZES], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    for name in arguments.models or _SIZES:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_run, args=(rank, name, folder, arguments.rounds)) for rank in (0, 1)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                return 1
    return 0
