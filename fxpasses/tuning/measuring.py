"""Measurements of programs: the time of two in turns, and the memory of one."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.checking.execution.inputs import cloned
from fxpasses.tuning import _torch
from fxpasses.tuning.intervals import LOOKS, Interval, median_interval

MIN_SECONDS = 0.004
"""The minimum seconds of one measurement. A faster program runs several times in each."""

_LOST_PAIRS, _LOST_RATIO = 2, 1.5
"""With the time up, a program is given up if it took ``_LOST_RATIO`` times as long in all of
``_LOST_PAIRS`` pairs.
"""

_MIN_WIDTH = 0.01
"""Stop measuring once the interval is narrower than this."""


def wall_clock() -> float:
    """Return the time in seconds, after synchronizing with the accelerator if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def copy_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Copy inputs to measure on, because a graph may mutate any of them, such as an optimizer's parameters.

    Raises:
        Unsupported: a tensor cannot be copied.
    """
    distinct = {id(value): value for value in inputs}
    copies = dict(zip(distinct, cloned(list(distinct.values())), strict=True))
    for key, value in distinct.items():
        if isinstance(value, Tensor) and value.requires_grad:
            copies[key].requires_grad_()
    return [copies[id(value)] for value in inputs]


class Program:
    """A compiled graph with inputs to run it on: forward, then backward if an output requires grad.

    Args:
        run: takes the inputs and returns a tuple or list of outputs.
        inputs: its arguments.
    """

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.run, self._inputs = run, list(inputs)
        self._inputs_with_grad = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
        self._grad_outputs: list[Tensor] | None = None

    def step(self) -> None:
        """Run the program once."""
        outputs = self.run(*self._inputs)
        roots = [v for v in outputs if isinstance(v, Tensor) and v.requires_grad]
        if roots and self._inputs_with_grad and torch.is_grad_enabled():
            if self._grad_outputs is None:
                self._grad_outputs = [torch.randn_like(v) for v in roots]
            torch.autograd.grad(roots, self._inputs_with_grad, self._grad_outputs, allow_unused=True)

    def peak_bytes(self) -> int:
        """Return the peak memory of tensors made by one step: the second, because the first makes more."""
        self.step()
        gc.collect()
        return _torch.peak_bytes(self.step)


def duel(
    old: Callable[[], object],
    new: Callable[[], object],
    *,
    clock: Callable[[], float] = wall_clock,
    is_conclusive: Callable[[Interval], bool],
    has_time: Callable[[], bool] = lambda: True,
    min_pairs: int = LOOKS[0],
) -> Interval:
    """Run two programs in turns, and return the ratio of their times, new over old.

    Args:
        old: the program to beat.
        new: the challenger.
        clock: returns seconds.
        is_conclusive: whether the interval answers the question. More pairs are measured until it does.
        has_time: whether to measure another pair.
        min_pairs: how many pairs to measure even without time.
    """
    times = [_seconds(clock, program, 1) for program in (old, new, old, new)]  # also warms both up
    repeats = max(1, round(MIN_SECONDS / max(min(times[2:]), MIN_SECONDS / 100)))
    rng = random.Random(0)
    ratios: list[float] = []
    for look in LOOKS:
        while len(ratios) < look and (has_time() or (len(ratios) < min_pairs and not _has_lost(ratios))):
            if rng.random() < 0.5:
                first, second = _seconds(clock, old, repeats), _seconds(clock, new, repeats)
            else:
                second, first = _seconds(clock, new, repeats), _seconds(clock, old, repeats)
            ratios.append(second / first if first > 0 else 1.0)
        interval = median_interval(ratios)
        if (
            is_conclusive(interval)
            or interval.high - interval.low < _MIN_WIDTH
            or len(ratios) < look
            or (len(ratios) >= min_pairs and not has_time())
        ):
            break
    return interval


def _has_lost(ratios: Sequence[float]) -> bool:
    """Whether the new program has clearly lost. More pairs would only tell by how much it is slower."""
    return len(ratios) >= _LOST_PAIRS and min(ratios) > _LOST_RATIO


def _seconds(clock: Callable[[], float], program: Callable[[], object], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        program()
    return clock() - start
