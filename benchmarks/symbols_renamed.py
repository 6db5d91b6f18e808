"""An operator first seen on new symbols: torch's mode against ours, which has seen it on other symbols.

Each call is the first in its environment. Environments are made beforehand and called one after the other, torch's and
ours in turns of a few: with a collection of garbage between two calls, one measures how cold the processor's caches are.
Times are of the thread's processor: a call is measured once, and a shared machine takes the processor away meanwhile.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

from benchmarks._fake_support import parser, report
from benchmarks.fake_dispatch import OPERATORS, make
from fake import FakeTensorMode

CALLS_IN_A_ROW = 8


def first_calls(mode_class: type, name: str) -> list[float]:
    """Processor seconds of the first call of an operator in each of some new environments."""
    call: Any = OPERATORS[name]
    made = [make(mode_class, True) for _ in range(CALLS_IN_A_ROW + 1)]
    gc.collect()
    gc.disable()
    seconds = []
    for mode, tensors in made:
        with mode:
            start = time.thread_time()
            call(tensors)
            seconds.append(time.thread_time() - start)
    gc.enable()
    return seconds[1:]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=5).parse_args(argv)
    torch.set_num_threads(1)
    ratios = []
    for name in OPERATORS:
        for mode_class in (TorchFakeTensorMode, FakeTensorMode):
            first_calls(mode_class, name)
        seconds: dict[type, list[float]] = {TorchFakeTensorMode: [], FakeTensorMode: []}
        for _ in range(options.rounds):
            for mode_class, measured in seconds.items():
                measured.extend(first_calls(mode_class, name))
        medians = [statistics.median(measured) for measured in seconds.values()]
        ratios.append(report(name, [medians[0]], [medians[1]], 1e6, "us"))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean {mean:.2f} x, worst {min(ratios):.2f} x")
    return 0
