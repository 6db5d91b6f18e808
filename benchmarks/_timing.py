"""Interleaved timing: contestants take turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

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
