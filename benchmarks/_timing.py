"""Interleaved timing: contestants take turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def interleaved(
    contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of a call of each contestant, over ``rounds`` rounds in which each is called once."""
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
    """Seconds of each contestant in each round, in which all run in random order.

    Args:
        contestants: what runs, by name.
        rounds: how many measurements of each.
        clock: gives seconds.
        shortest: seconds of one measurement: what takes less runs several times in each.
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
