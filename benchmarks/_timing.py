"""Interleaved timing: contestants take turns, so that slow moments of the machine affect all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def interleaved(
    contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds per call of each contestant; all are called once in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def turns(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    shortest: float = 0.004,
) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round; all of them run in each round, in random order.

    Args:
        contestants: what to run, by name.
        rounds: the number of measurements of each.
        clock: returns seconds.
        shortest: minimum seconds of a measurement; shorter calls are repeated within it.
    """
    for call in contestants.values():
        call()
    once = min(_seconds(call, clock, 1) for call in contestants.values())
    repeats = max(1, round(shortest / max(once, shortest / 100)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            seconds[name].append(_seconds(contestants[name], clock, repeats))
    return seconds


def _seconds(call: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return clock() - start
