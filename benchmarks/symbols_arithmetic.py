"""Arithmetic and comparisons of symbolic integers, and tensors of symbolic sizes: ours against torch's."""

from __future__ import annotations

import operator
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

from benchmarks._fake_support import parser, report
from benchmarks.fake_dispatch import make
from fake import FakeTensorMode

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "eq": operator.eq,
    "gt": operator.gt,
    "floordiv": operator.floordiv,
}


def microseconds(call: Callable[[], object], number: int) -> float:
    """Return the best of five runs, in microseconds of processor time."""
    return min(timeit.repeat(call, timer=time.process_time, number=number, repeat=5)) / number


def compare(title: str, calls: list[Callable[[], object]], rounds: int, number: int) -> None:
    """Print one line: torch's call and ours, timed in turns."""
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for place, call in enumerate(calls):
            call()
            seconds[place].append(microseconds(call, number))
    report(title, [min(seconds[0])], [min(seconds[1])], 1e6, "us")


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=5, number=500).parse_args(argv)
    torch.set_num_threads(1)
    (torchs, theirs), (mode, ours) = make(TorchFakeTensorMode, True), make(FakeTensorMode, True)
    sizes = [tensors["x"].shape for tensors in (theirs, ours)]
    for name, operation in OPERATIONS.items():
        pairs = [lambda s=s, f=operation: f(s[0], s[1]) for s in sizes]
        compare(name, pairs, options.rounds, options.number)  # type: ignore[arg-type]
        pairs = [lambda s=s, f=operation: f(s[0], 4) for s in sizes]
        compare(f"{name} with a number", pairs, options.rounds, options.number)  # type: ignore[arg-type]
    conditions = [lambda s=s: bool(s[0] > 3) for s in sizes]
    compare("bool(size > 3), known", conditions, options.rounds, options.number)  # type: ignore[arg-type]

    def empty(mode: Any, size: Any) -> Callable[[], object]:
        def call() -> None:
            with mode:
                for _ in range(20):
                    torch.empty(size[0], size[1])

        return call

    makers = [empty(torchs, sizes[0]), empty(mode, sizes[1])]
    compare("20 tensors with two sizes", makers, options.rounds, max(options.number // 50, 1))
    return 0
