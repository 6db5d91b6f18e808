"""Overhead of a call besides its compiled code: guards and wrappers of ``torch.compile`` and of a plan.

``python -m benchmarks call_overhead``. Reports microseconds of CPU time per call (medians of interleaved
rounds) and the median of the rounds' ratios. The compiled code is replaced by a function that returns a
recorded result. With ``--whole``, the whole call of Inductor is measured against that of a plan of
``fxpasses.compile``, in inference and in training, forward and backward. This takes long to compile.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxpasses
from fxpasses.demo.gpt import GPT

CALLS = 20


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = GPT(options.layers, 8, 2, 4, 16)
    tokens, targets = (torch.zeros(1, 4, dtype=torch.long) for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o700)
        plan = fxpasses.compile(model, cache=directory)
        calls: dict[str, Any] = {"eager": model, "plan": plan}
        if options.whole:
            calls["inductor"] = torch.compile(model)
        training = {name: lambda call=call: call(tokens, targets).backward() for name, call in calls.items()}
        with torch.no_grad():
            inference = {name: lambda call=call: call(tokens, targets) for name, call in calls.items()}
            _show("inference, whole", inference, options.rounds)
        _show("training, whole", training, options.rounds)
        with torch.no_grad():
            result = model(tokens, targets)
            torch._dynamo.reset()
            dynamo = torch.compile(model, backend=lambda gm, inputs: lambda *args: (result,))
            dynamo(tokens, targets)
            _return_at_once(plan, tokens, targets)
            around = {"plan": lambda: plan(tokens, targets), "torch.compile": lambda: dynamo(tokens, targets)}
            _show("inference, around the code", around, options.rounds)
    return 0


def _return_at_once(compiled: fxpasses.Compiled[Any], *arguments: torch.Tensor) -> None:
    """Replace the code of the plan by a function that returns the results of one call."""
    for _ in range(2):  # the first call traces the model again, because Dynamo has left marks on it
        compiled(*arguments)
    (walked_model,) = compiled._walked_models.known
    assert walked_model._quick
    for _, _, plan in walked_model._quick:
        outputs = plan._run(plan._inputs_of(arguments))
        plan._run = lambda inputs, outputs=outputs: outputs


def _show(what: str, calls: dict[str, Callable[[], Any]], rounds: int) -> None:
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(CALLS):
                call()
            times[name].append((time.process_time() - start) / CALLS * 1e6)
    told = (f"{name} {statistics.median(values):.0f} us" for name, values in times.items())
    ratios = (
        f"plan / {name} {statistics.median(map(operator.truediv, times['plan'], values)):.2f}"
        for name, values in times.items()
        if name != "plan"
    )
    print(f"{what}: {', '.join((*told, *ratios))}", flush=True)
