"""Private names of torch that tuning relies on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import profile

from fake.seam.dispatch import OpOverload
from fake.seam.fx import detect_fake_mode
from fake.seam.guards import TracingContext


def peak_bytes(step: Callable[[], object]) -> int:
    """The most memory that tensors made inside of ``step`` take at once: as allocators report it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as recorded:
        step()
    results = recorded.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"] if results is not None else []
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
