"""An operator first seen on new symbols: torch's mode against ours, which has seen it on other symbols.

Each round makes one mode, and in it tensors with symbols of their own for every operator; then all operators are called
once, one after the other, in another order each round; torch's mode and ours take turns. That is how symbols come up in
practice: a trace of a model meets hundreds of operators in one new environment, with the code that serves them at work
all the time. ``--alone`` makes a mode for each single call, and measures how cold the processor's caches are, too: making
the inputs runs through a large part of torch and sympy, and a call of a tenth of a millisecond then takes two or three.
Times are of the thread's processor: a call is measured once, and a shared machine takes the processor away meanwhile.
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
    """Processor seconds of the first call of each operator, on symbols of its own, in one new mode."""
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
                    if number >= 2:  # the rest is the first use of something in this process
                        found[name].append(seconds)
    theirs, ours = measured.values()
    ratios = [
        report(name, [statistics.median(theirs[name])], [statistics.median(ours[name])], 1e6, "us")
        for name in OPERATORS
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean {mean:.2f} x, worst {min(ratios):.2f} x")
    return 0
