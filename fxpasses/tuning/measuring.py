"""Measuring programs: two of them in turns, and the memory of one."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.checking.inputs import cloned
from fxpasses.tuning import _torch
from fxpasses.tuning.intervals import LOOKS, Interval, median_interval

_SHORTEST = 0.004
"""Seconds of one measurement: a program that takes less runs several times in each."""

_FEWEST, _LOST = 2, 1.5
"""Pairs after which a program that took so many times as long in each is given up, if the time is up."""

_UNEVEN = 0.01
"""Ratios closer than this to each other are not told apart for longer."""


def wall_clock() -> float:
    """Seconds, once all work that accelerators were given is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def own_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Copies of inputs to measure on: a graph may write to any of them, to the parameters of an optimizer, say.

    Raises:
        Unsupported: for a tensor that cannot be copied.
    """
    distinct = {id(value): value for value in inputs}
    copies = dict(zip(distinct, cloned(list(distinct.values())), strict=True))
    for key, value in distinct.items():
        if isinstance(value, Tensor) and value.requires_grad:
            copies[key].requires_grad_()
    return [copies[id(value)] for value in inputs]


class Program:
    """A compiled graph, with inputs to run it on: forward, and backward where an output needs it.

    Args:
        run: takes the inputs and returns a tuple or list of outputs.
        inputs: its arguments.
    """

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.run, self._inputs = run, list(inputs)
        self._wanted = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
        self._gradients: list[Tensor] | None = None

    def step(self) -> None:
        """Run it once."""
        outputs = self.run(*self._inputs)
        ends = [v for v in outputs if isinstance(v, Tensor) and v.requires_grad]
        if ends and self._wanted and torch.is_grad_enabled():
            if self._gradients is None:
                self._gradients = [torch.randn_like(v) for v in ends]
            torch.autograd.grad(ends, self._wanted, self._gradients, allow_unused=True)

    def peak_bytes(self) -> int:
        """The most memory that tensors made by one step take at once: not the first one, which makes more than later ones do."""
        self.step()
        gc.collect()
        return _torch.peak_bytes(self.step)


def duel(
    old: Callable[[], object],
    new: Callable[[], object],
    *,
    clock: Callable[[], float] = wall_clock,
    settled: Callable[[Interval], bool],
    has_time: Callable[[], bool] = lambda: True,
    least: int = LOOKS[0],
) -> Interval:
    """Run two programs in turns, and return the ratio of their times, new over old.

    Args:
        old: the program to beat.
        new: the other one.
        clock: gives seconds.
        settled: whether the interval answers the question; more pairs are measured until it does.
        has_time: whether to measure another pair.
        least: how many pairs are measured though there is no time.
    """
    times = [_seconds(clock, program, 1) for program in (old, new, old, new)]  # also warms both up
    repeats = max(1, round(_SHORTEST / max(min(times[2:]), _SHORTEST / 100)))
    order = random.Random(0)
    ratios: list[float] = []
    for look in LOOKS:
        while len(ratios) < look and (has_time() or (len(ratios) < least and not _is_lost(ratios))):
            if order.random() < 0.5:
                first, second = _seconds(clock, old, repeats), _seconds(clock, new, repeats)
            else:
                second, first = _seconds(clock, new, repeats), _seconds(clock, old, repeats)
            ratios.append(second / first if first > 0 else 1.0)
        found = median_interval(ratios)
        if (
            settled(found)
            or found.high - found.low < _UNEVEN
            or len(ratios) < look
            or (len(ratios) >= least and not has_time())
        ):
            break
    return found


def _is_lost(ratios: Sequence[float]) -> bool:
    """Whether nothing is to be won: measuring on, though the time is up, would only tell by how much the new program is slower."""
    return len(ratios) >= _FEWEST and min(ratios) > _LOST


def _seconds(clock: Callable[[], float], program: Callable[[], object], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        program()
    return clock() - start
