"""First calls of operators on new symbols: torch's mode against ours, which has seen other symbols.

Each round makes one mode with separate symbols for every operator. It then calls each operator once, in a new
order each round; torch's mode and ours take turns. This is how symbols occur in practice: a trace of a model
meets hundreds of operators in one new environment, while the code that handles them stays warm. ``--alone``
makes a mode for each call, which also measures cold processor caches: making the inputs runs much of torch
and sympy, and a call of a tenth of a millisecond then takes two or three. Times are processor time of the
thread, because each call is measured only once and a shared machine may preempt it.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

from benchmarks._fake_support import parser, report
from benchmarks.fake_dispatch import OPERATORS, inputs
from fake import FakeTensorMode, ShapeEnv

ENVIRONMENTS = {TorchFakeTensorMode: torch.fx.experimental.symbolic_shapes.ShapeEnv, FakeTensorMode: ShapeEnv}


def first_calls(mode_class: type, names: list[str]) -> dict[str, float]:
    """Return the processor seconds of each operator's first call, on its own symbols, in one new mode."""
    mode = mode_class(shape_env=ENVIRONMENTS[mode_class]())
    made = [(name, inputs(mode, symbolic=True, prefix=name)) for name in names]
    seconds = {}
    gc.disable()
    with mode:
        for name, tensors in made:
            call: Any = OPERATORS[name]
            start = time.thread_time()
            call(tensors)
            seconds[name] = time.thread_time() - start
    gc.enable()
    return seconds


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    command = parser(__doc__, rounds=15)
    command.add_argument("--alone", action="store_true", help="a mode for each call")
    options = command.parse_args(argv)
    torch.set_num_threads(1)
    order = random.Random(0)
    measured: dict[type, dict[str, list[float]]] = {kind: {n: [] for n in OPERATORS} for kind in ENVIRONMENTS}
    for number in range(options.rounds + 2):
        names = order.sample(list(OPERATORS), len(OPERATORS))
        for group in [[name] for name in names] if options.alone else [names]:
            for kind, found in measured.items():
                for name, seconds in first_calls(kind, group).items():
                    if number >= 2:  # earlier rounds warm up this process
                        found[name].append(seconds)
    theirs, ours = measured.values()
    ratios = [
        report(name, [statistics.median(theirs[name])], [statistics.median(ours[name])], 1e6, "us")
        for name in OPERATORS
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean {mean:.2f} x, worst {min(ratios):.2f} x")
    return 0
