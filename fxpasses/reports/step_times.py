"""Measured steps: how long they take, and where the time goes, compiled and in eager."""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import profiler

from fxpasses.reports.versions import STEPS_FILE

_WARMUP_STEPS = 2
_MAX_EVENTS = 400
"""How many events are kept: those that take longest."""


def measure_steps(step: Callable[[], object], directory: Path, count: int = 5) -> None:
    """Measure steps, alternating between compiled and eager, and then again under ``torch.profiler``.

    Writes ``steps.json``, and for Perfetto ``steps_compiled.trace.json`` and ``steps_eager.trace.json``.

    Args:
        step: runs one step. What it calls is already compiled. It is called ``2 * count + 3`` times each way.
        directory: the directory of the report.
        count: the number of steps to measure, and to run under the profiler.
    """
    stances = {"compiled": "default", "eager": "force_eager"}
    data: dict[str, Any] = {"count": count, **{way: {"seconds": [], "events": []} for way in stances}}
    for number in range(_WARMUP_STEPS + count):
        for way, stance in stances.items():
            with torch.compiler.set_stance(stance):
                seconds = _time_step(step)
            if number >= _WARMUP_STEPS:
                data[way]["seconds"].append(seconds)
    for way, stance in stances.items():
        schedule = profiler.schedule(wait=0, warmup=1, active=count, repeat=1)
        with torch.compiler.set_stance(stance), profiler.profile(schedule=schedule) as profile:
            for _ in range(1 + count):
                _time_step(step)
                profile.step()
        profile.export_chrome_trace(str(directory / f"steps_{way}.trace.json"))
        data[way]["profiled"], data[way]["events"] = _seconds_and_events(profile, count)
    (directory / STEPS_FILE).write_text(json.dumps(data))


def _seconds_and_events(profile: Any, count: int) -> tuple[list[float], list[list[Any]]]:
    """Return the seconds of each profiled step, and what each event takes of a step.

    Events are medians over steps, so that one interrupted step has no effect.
    """
    recorded = profile.events()
    marks = [e.time_range for e in recorded if e.key.startswith("ProfilerStep") and not e.device_type.value]
    starts = sorted({mark.start for mark in marks})
    per_key: dict[str, list[list[float]]] = {}
    for event in recorded:
        if event.key.startswith("ProfilerStep"):
            continue
        step = max(0, bisect.bisect_right(starts, event.time_range.start) - 1)
        sums = per_key.setdefault(event.key, [[0.0] * 4 for _ in range(count)])[min(step, count - 1)]
        times = (event.cpu_time_total, event.self_cpu_time_total, event.self_device_time_total)
        sums[0] += 1
        for i, microseconds in enumerate(times, 1):
            sums[i] += microseconds * 1e-6
    events = [[key, *map(median, zip(*sums, strict=True))] for key, sums in per_key.items()]
    events = [event for event in events if event[1]]  # events that occur in most steps
    seconds = [mark.elapsed_us() * 1e-6 for mark in marks]
    return seconds, sorted(events, key=lambda event: -event[3] - event[4])[:_MAX_EVENTS]


def _time_step(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start
