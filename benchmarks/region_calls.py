"""Runtime overhead of one call of a region over the compiled code that it runs.

``python -m benchmarks region_calls``. Measures a GPT layer, forward and backward, on tensors so small that
its code takes almost no time. It is called as the generated function around regions calls it, and as an
operator through torch's dispatcher (as under CUDA graphs). Results are medians; the inputs are those of a
training step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.demo.gpt import GPT
from fxpasses.regional.compiled_region import CompiledRegion, table

REPEATS = 3000


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median microseconds of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def of_region(dynamic: bool) -> dict[str, tuple[int, float, float, float]]:
    """Return, per pass, the number of tensors of a call and the microseconds of code, call and operator."""
    torch._dynamo.reset()
    fxpasses.reset_stats()
    model = GPT(4, 8, 2, 4, 16)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    step = torch.compile(model, backend=backend, options={"regions": "always"}, dynamic=dynamic)
    step(tokens, tokens).backward()
    region: CompiledRegion = table[fxpasses.stats().region_reports[-1].taken[0].key]
    given: dict[str, list[Any]] = {}

    def remember(name: str, inner: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def run(inputs: list[Any]) -> Any:
            given.setdefault(name, list(inputs))
            return inner(inputs)

        return run

    assert region.backward is not None
    code = {"forward": region.forward, "backward": region.backward}
    region.forward = remember("forward", region.forward)
    region.backward = remember("backward", region.backward)
    step(tokens, tokens).backward()
    region.forward, region.backward = code["forward"], code["backward"]
    sizes = [value for value in given["forward"] if isinstance(value, int)]
    call = {"forward": region.run_forward, "backward": region.run_backward}
    operator = {
        "forward": torch.ops.fxpasses.region_forward.default,
        "backward": torch.ops.fxpasses.region_backward.default,
    }
    found = {}
    for name, inputs in given.items():
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        with torch.no_grad():
            times = (
                microseconds(lambda name=name, inputs=inputs: code[name](list(inputs))),
                microseconds(lambda name=name, tensors=tensors: call[name](list(tensors), sizes)),
                microseconds(lambda name=name, tensors=tensors: operator[name](region.key, tensors, sizes)),
            )
        found[name] = (len(tensors), *times)
    return found


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)
    shown = Table("shapes", "pass", "tensors", "code (us)", "call adds (us)", "operator adds (us)")
    for dynamic in (False, True):
        for name, (tensors, code, call, operator) in of_region(dynamic).items():
            cells = (f"{code:.1f}", f"{call - code:.1f}", f"{operator - code:.1f}")
            shown.add_row("dynamic" if dynamic else "static", name, str(tensors), *cells)
    Console(width=120).print(shown)
    return 0
