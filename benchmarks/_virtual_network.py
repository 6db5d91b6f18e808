"""The slow network in virtual time: CPU time of the calling thread plus the time it would wait for messages.

On a busy machine, or one with fewer cores than processes, wall time measures the machine. This measures the
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from benchmarks._slow_network import BANDWIDTH, LATENCY, SlowGroup

__all__ = ["VirtualClock", "init_virtual_process_group"]


class VirtualClock:
    """The virtual time of this process."""

    waited = 0.0
    free = 0.0
    """When the network has sent everything that it was given."""
    sent: list[Any] = []
    """Work in flight, kept alive until the step ends: torch identifies work by its address."""

    @classmethod
    def now(cls) -> float:
        return time.thread_time() + cls.waited

    @classmethod
    def begin(cls) -> float:
        """Begin a step with nothing in flight."""
        cls.sent.clear()
        cls.free = cls.now()
        return cls.free


class _Work(dist.Work):
    def __init__(self, end: float, result: Any) -> None:
        super().__init__()
        self._end, self._result, self._future = end, result, Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        VirtualClock.waited += max(0.0, self._end - VirtualClock.now())
        return True

    def get_future(self) -> Future:
        return self._future

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._result if isinstance(self._result, list) else [self._result]


class _VirtualGroup(SlowGroup):
    def _put(self, whole: int, work: Callable[[], object], result: Any) -> Any:
        seconds = LATENCY + whole * (self._size - 1) / self._size / BANDWIDTH if whole else 0.0
        start = time.thread_time()
        work()
        VirtualClock.waited -= time.thread_time() - start  # not this thread's work
        VirtualClock.free = max(VirtualClock.now(), VirtualClock.free) + seconds
        VirtualClock.sent.append(_Work(VirtualClock.free, result))
        return VirtualClock.sent[-1]


def init_virtual_process_group(store: Any, rank: int, size: int) -> None:
    """Call ``init_process_group`` with this group."""
    dist.Backend.register_backend("slow", _VirtualGroup, devices=["cpu"])
    dist.init_process_group("slow", store=store, rank=rank, world_size=size)
