"""Kernel times on this machine: each matmul, convolution and attention of a graph runs alone.

The tensors have the sizes and strides of the graph. FLOPs cannot tell one library's matmul from another's,
nor one large matmul from two small ones. Measured times can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam import pytree
from fake.seam.fx import size_hint
from fxpasses._torch import outside_tracing
from fxpasses.graphs.onednn import onednn_pixelwise, onednn_pixelwise_weight
from fxpasses.partitioner.cost import CostModel
from fxpasses.tuning.measuring import wall_clock

_MAX_RUNS = 4
"""How often each call runs, including a first time that loads what it needs.

The shortest time counts, because other work on the machine only adds to it.
"""

aten = torch.ops.aten

_CHANNELS_LAST_OPS = (
    aten.convolution.default, aten.convolution_backward.default, onednn_pixelwise, onednn_pixelwise_weight
)  # fmt: skip
"""Calls whose images Inductor lays out channels-last on the CPU, whatever the strides in the graph."""

_MAX_SECONDS = 0.05
"""A call is not run again after this many seconds."""


class KernelTimes:
    """Times of calls that have a FLOP formula. Each kind of call is measured at most once.

    Args:
        seconds: the total time limit for measuring. Calls beyond it have no time.
        clock: returns the seconds that are measured.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = wall_clock) -> None:
        self._seconds_left, self._clock = seconds, clock
        self._times: dict[object, float | None] = {}

    def seconds(self, node: fx.Node) -> float | None:
        """Return the time of a call; ``None`` if it is unknown. Args: a call with values in its ``meta``."""
        if not CostModel.has_formula(node):
            return None
        metadata_of = _channels_last_metadata if node.target in _CHANNELS_LAST_OPS else _metadata
        values = pytree.tree_map(metadata_of, (node.args, node.kwargs))
        key = (node.target, repr(values))
        if key not in self._times:
            start = time.monotonic()
            self._times[key] = self._measure(node, values) if self._seconds_left > 0 else None
            self._seconds_left -= time.monotonic() - start
        return self._times[key]

    def has_all_times(self, gm: fx.GraphModule) -> bool:
        """Whether the times of all calls in the graph that have a FLOP formula are known."""
        return all(self.seconds(n) is not None for n in gm.graph.nodes if CostModel.has_formula(n))

    def _measure(self, node: fx.Node, values: Any) -> float | None:
        assert callable(node.target)
        with outside_tracing(), torch.no_grad():
            try:
                args, kwargs = pytree.tree_map(_materialize, values)
                times: list[float] = []
                while len(times) < _MAX_RUNS and sum(times) < _MAX_SECONDS:
                    start = self._clock()
                    node.target(*args, **kwargs)
                    times.append(self._clock() - start)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None  # the call rejects these values, or memory ran out: its time is estimated
        return min(times)


class _TensorMetadata:
    """The metadata of a tensor, without its values."""

    def __init__(self, value: Tensor) -> None:
        self.size, self.stride = [[size_hint(n) for n in dims] for dims in (value.shape, value.stride())]
        self.dtype, self.device = value.dtype, value.device

    def __repr__(self) -> str:
        return f"{self.dtype} {self.size} {self.stride} {self.device}"


def _metadata(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return _TensorMetadata(value)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _channels_last_metadata(value: Any) -> Any:
    metadata = _metadata(value)
    if isinstance(metadata, _TensorMetadata) and len(metadata.size) == 4 and metadata.device.type == "cpu":
        metadata.stride = list(
            torch.empty(metadata.size, device="meta", memory_format=torch.channels_last).stride()
        )
    return metadata


def _materialize(value: Any) -> Any:
    """Make a tensor of ones from its description. Zeros or leftover memory may be slow to compute with."""
    if not isinstance(value, _TensorMetadata):
        return value
    return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device).fill_(1)
