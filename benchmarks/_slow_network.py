"""A CPU process group with fixed latency and bandwidth: gloo behind a thread that sends messages in turn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

LATENCY, BANDWIDTH = 8e-3, 200e6
"""Seconds per message, and bytes per second."""

__all__ = ["BANDWIDTH", "LATENCY", "SlowGroup", "init_slow_process_group"]


class SlowGroup(dist.ProcessGroup):
    """A process group whose collectives take latency plus sent bytes over bandwidth, one at a time.

    Collectives run one after another, as on one stream of NCCL.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("slow", store), rank, size, timeout)
        self._rank, self._size = rank, size
        self._queue: queue.Queue[tuple[float, Callable[[], object], Any, Future]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        while True:
            seconds, work, result, future = self._queue.get()
            end = time.perf_counter() + seconds
            try:
                work()
            except RuntimeError as error:
                future.set_exception(error)
                continue
            time.sleep(max(0.0, end - time.perf_counter()))
            future.set_result(result)

    def _put(self, whole: int, work: Callable[[], object], result: Any) -> Any:
        future: Future = Future()
        seconds = LATENCY + whole * (self._size - 1) / self._size / BANDWIDTH if whole else 0.0
        self._queue.put((seconds, work, result, future))
        return _create_work_from_future(future)

    def getBackendName(self) -> str:
        return "slow"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return self._put(output.nbytes, lambda: self._gloo._allgather_base(output, source).wait(), output)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return self._put(source.nbytes, lambda: self._scatter_sum(output, source, opts), output)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> Any:
        def work() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._gloo._allgather_base(output, source).wait()

        return self._put(sum(t.nbytes for t in outputs), work, outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> Any:
        def work() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._scatter_sum(output, source, opts)

        return self._put(sum(t.nbytes for t in sources), work, outputs)

    def _scatter_sum(self, output: Tensor, source: Tensor, options: Any) -> None:
        total = source.clone()
        self._gloo.allreduce([total]).wait()
        output.copy_(total.view(self._size, -1)[self._rank].view_as(output))
        if "AVG" in str(getattr(options, "reduceOp", "")):
            output.div_(self._size)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._put(2 * tensors[0].nbytes, lambda: self._gloo.allreduce(tensors).wait(), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._put(0, lambda: self._gloo.broadcast(tensors, opts).wait(), tensors)

    def scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], opts: Any = None) -> Any:
        return self._put(0, lambda: self._gloo.scatter(outputs, sources, opts).wait(), outputs)

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> Any:
        return self._put(0, lambda: self._gloo.allgather(outputs, sources).wait(), outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._put(0, lambda: self._gloo.barrier().wait(), [])


def init_slow_process_group(store: Any, rank: int, size: int) -> None:
    """Call ``init_process_group`` with this group."""
    dist.Backend.register_backend("slow", SlowGroup, devices=["cpu"])
    dist.init_process_group("slow", store=store, rank=rank, world_size=size)
