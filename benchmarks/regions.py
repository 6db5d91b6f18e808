"""Compile time over depth if every repeated layer is compiled once: first step, later steps, memory.

First steps are in wall and CPU seconds (other processes disturb CPU time less), later steps in CPU time.
*saved* is what autograd saves for the backward pass. *live* is the peak memory that a step allocates,
including the buffers of compiled code. *resident* is the peak resident memory of the process over a few
training steps. *over* is how much of it the steps add to the process with its compiled code.

``python -m benchmarks regions [--layers 4 12 48] [--shapes static dynamic] [--who ...]``. Each measurement
runs in its own process without caches (or, with ``--warm``, in one that fills the caches and one that reads
them), after a warm-up compilation that loads torch's compiler. Contestants: ``inductor``; ``deduplicated``
(``inductor`` with torch's ``use_graph_deduplication``); ``by hand`` (regional compilation: each block
compiled on its own); ``whole`` (fxpasses without regions); ``regions`` (fxpasses with
``options={"regions": "auto"}``).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.demo.gpt import GPT

WHO = ("inductor", "deduplicated", "by hand", "whole", "regions")


def contestant(who: str, model: GPT, dynamic: bool) -> Callable[..., Any]:
    """Compile the model in the contestant's way."""
    if who in ("whole", "regions"):
        options = {"regions": "auto" if who == "regions" else "off"}
        return torch.compile(model, backend=backend, options=options, dynamic=dynamic)
    if who == "by hand":
        for block in model.blocks:
            block.compile(backend="inductor", dynamic=dynamic)
        return model
    torch._dynamo.config.use_graph_deduplication = who == "deduplicated"
    return torch.compile(model, backend="inductor", dynamic=dynamic)


def measure(settings: argparse.Namespace) -> dict[str, float]:
    """Measure the first training step (wall and CPU seconds), later steps and peak memory here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.compile(lambda x: x.sin().sum(), dynamic=settings.dynamic)(
        torch.ones(3, requires_grad=True)
    ).backward()
    torch._dynamo.reset()
    model = GPT(settings.layers, settings.width, settings.heads, settings.tokens, 512)
    tokens, targets = torch.randint(512, (2, settings.batch, settings.tokens))
    call = contestant(settings.who, model, settings.dynamic)

    def step() -> None:
        model.zero_grad()
        call(tokens, targets).backward()

    start, used = time.perf_counter(), _cpu_seconds()
    step()
    first, first_cpu = time.perf_counter() - start, _cpu_seconds() - used
    later = []
    for _ in range(settings.steps):
        used = time.process_time()
        step()
        later.append(time.process_time() - used)
    saved = kept_bytes(call(tokens, targets), model)
    result = {
        "first": first,
        "cpu": first_cpu,
        "later": statistics.median(later) if later else 0.0,
        "saved": float(saved),
        "live": live_peak(step),
    }
    before, most = resident_peak(step)
    result |= {"resident": most, "over": most - before}
    if settings.who in ("whole", "regions"):
        result |= {f"seconds in {name}": value for name, value in fxpasses.stats().seconds.items()}
    return result


def live_peak(step: Callable[[], None]) -> float:
    """Return the peak bytes of tensors during a step, beyond those that exist before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert profile.profiler is not None
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return float(max(itertools.accumulate(e.nbytes() for e in changes), default=0))


def resident_peak(step: Callable[[], None]) -> tuple[float, float]:
    """Return the resident bytes of this process before some training steps, and the peak during them.

    First returns the memory that compilation freed to the system and resets the kernel's high-water mark.
    Otherwise the peak would be that of compilation and would depend on the order of allocations.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return before, _status("VmHWM")


def _status(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return float(line.split()[1]) * 1024.0


def kept_bytes(output: torch.Tensor, model: torch.nn.Module) -> int:
    """Return the bytes that autograd saves for the backward pass of a result, without parameters."""
    storages: dict[int, int] = {}
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in getattr(node, "saved_tensors", ()):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        pending += [following for following, _ in node.next_functions]
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers that it has started."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def in_a_process(settings: argparse.Namespace, cache: str | None) -> dict[str, float]:
    """Run :func:`measure` in a fresh process, without caches or with the caches in a directory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if cache is None:
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        with tempfile.TemporaryDirectory() as fresh:
            return _run(settings, {**environment, "TORCHINDUCTOR_CACHE_DIR": fresh})
    return _run(settings, {**environment, "TORCHINDUCTOR_CACHE_DIR": cache})


def _run(settings: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    given = json.dumps(vars(settings))
    command = [sys.executable, "-m", "benchmarks", "regions", "--measure", given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{settings.who} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def search_seconds(calls: int) -> tuple[int, float]:
    """Return the size of a Dynamo graph of about ``calls`` calls, and the seconds of the region search."""
    found: list[tuple[int, float]] = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        reports = [fxpasses.regions(gm) for _ in range(3)]
        found.append((reports[0].calls, statistics.median(r.search_seconds for r in reports)))
        return gm

    tokens = torch.zeros(1, 4, dtype=torch.long)
    torch.compile(GPT(calls // 17, 8, 2, 4, 16), backend=look)(tokens, tokens)
    return found[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks regions", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 48])
    parser.add_argument("--shapes", nargs="+", choices=["static", "dynamic"], default=["static", "dynamic"])
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="later steps, of which the median is shown")
    parser.add_argument("--repeats", type=int, default=1, help="processes for each measurement")
    parser.add_argument(
        "--warm", action="store_true", help="a second process with the caches of the first instead"
    )
    parser.add_argument("--search", type=int, default=0, help="only search a graph of that many calls")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(measure(argparse.Namespace(**json.loads(arguments.measure)))))
        return 0
    console = Console(width=150)
    if arguments.search:
        calls, seconds = search_seconds(arguments.search)
        console.print(f"{calls} calls searched in {seconds:.3f} s")
        return 0
    table = Table(
        "shapes",
        "layers",
        "what",
        "first step (s)",
        "ratio",
        "its CPU (s)",
        "ratio",
        "step (CPU ms)",
        "ratio",
        "saved (MB)",
        "ratio",
        "live (MB)",
        "ratio",
        "resident (MB)",
        "ratio",
        "over (MB)",
        "ratio",
    )
    for shapes in arguments.shapes:
        for layers in arguments.layers:
            reference: dict[str, float] = {}
            for who in arguments.who:
                chosen = ("width", "heads", "batch", "tokens", "steps")
                fields = {name: getattr(arguments, name) for name in chosen}
                settings = argparse.Namespace(who=who, layers=layers, dynamic=shapes == "dynamic", **fields)
                for label, result in _results(settings, arguments.repeats, arguments.warm):
                    console.log(shapes, layers, label, {k: round(v, 3) for k, v in result.items()})
                    reference = reference or result
                    cells = [f"{shapes}", f"{layers}", label]
                    units = {"first": 1.0, "cpu": 1.0, "later": 1e3, "saved": 1e-6, "live": 1e-6}
                    units |= {"resident": 1e-6, "over": 1e-6}
                    for name, unit in units.items():
                        cells += [
                            f"{result[name] * unit:.2f}",
                            f"{result[name] / (reference[name] or 1.0):.2f}",
                        ]
                    table.add_row(*cells)
    console.print(table)
    return 0


def _results(settings: argparse.Namespace, repeats: int, warm: bool) -> list[tuple[str, dict[str, float]]]:
    if warm:
        with tempfile.TemporaryDirectory() as cache:
            cold, again = in_a_process(settings, cache), in_a_process(settings, cache)
        return [(f"{settings.who}, cold", cold), (f"{settings.who}, warm", again)]
    runs = [in_a_process(settings, None) for _ in range(repeats)]
    return [(settings.who, {name: statistics.median(run[name] for run in runs) for name in runs[0]})]
