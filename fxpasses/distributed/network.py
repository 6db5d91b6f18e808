"""Cost of messages between processes: latency, bandwidth within and between machines, usual algorithms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fxpasses.errors import SimulationError

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Cluster:
    """Machines with equal devices, and their network.

    Times of collectives follow the alpha-beta model (Hockney 1994), with the costs of ring, tree and
    hierarchical algorithms as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH" (2005). It ignores congestion, stragglers and the load that sending puts on a device.

    Attributes:
        local: devices per machine.
        local_latency: seconds for a message between two devices of one machine.
        local_bandwidth: bytes per second that a device sends to others in its machine.
        latency: seconds for a message between machines.
        bandwidth: bytes per second that a device sends to other machines, through its own adapter.
        algorithm: of collectives: ``ring``, ``tree``, ``hierarchical``, or ``auto`` for the fastest of them
            and recursive doubling.
        flops: floating-point operations per second of a device.
        memory_bandwidth: bytes per second that a device reads and writes.
        launch: seconds that the shortest kernel takes.
        memory: bytes of memory per device; schedules that need more are not chosen.

    Raises:
        SimulationError: if a value is not a positive number (latencies may be 0), or the algorithm is
            unknown.
    """

    local: int = 8
    local_latency: float = 2e-6
    local_bandwidth: float = 400e9
    latency: float = 6e-6
    bandwidth: float = 45e9
    algorithm: str = "auto"
    flops: float = 400e12
    memory_bandwidth: float = 2.5e12
    launch: float = 3e-6
    memory: float = 80e9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "algorithm":
                if value not in ALGORITHMS and value != "auto":
                    raise SimulationError(f"algorithm {value!r} is not one of auto, {', '.join(ALGORITHMS)}")
                continue
            whole, may_be_zero = field.name == "local", field.name in ("local_latency", "latency", "launch")
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not right or not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                kind = f"{'a whole' if whole else 'a'} number {'of at least' if may_be_zero else 'above'} 0"
                raise SimulationError(
                    f"{field.name}: expected {kind}, got {value!r}; the default is {field.default!r}"
                )

    @classmethod
    def from_mapping(cls, given: Any) -> Cluster:
        """Make a cluster from the content of a YAML file: any of the attributes by name.

        Raises:
            SimulationError: for an unknown name, with the closest one, or a wrong value.
        """
        if not isinstance(given, Mapping):
            got = "nothing" if given is None else type(given).__name__
            raise SimulationError(f"expected NAME: VALUE lines, of {', '.join(_NAMES)}; got {got}")
        for name in given:
            if name not in _NAMES:
                import difflib

                near = difflib.get_close_matches(str(name), _NAMES, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_NAMES)}"
                raise SimulationError(f"unknown name {name!r}{hint}")
        # YAML reads 4e11 as a string; it requires 4.0e+11.
        return cls(
            **{name: _number(value) if name != "algorithm" else value for name, value in given.items()}
        )

    def compute_seconds(self, flops: float, moved: float) -> float:
        """Return a call's seconds: the longer of operations and bytes (roofline model), at least a launch."""
        return max(flops / self.flops, moved / self.memory_bandwidth, self.launch)

    def seconds(self, kind: str, size: int, ranks: int, stride: int = 1) -> float:
        """Return how long a collective takes if all ranks start at once.

        Args:
            kind: one of :data:`KINDS`.
            size: bytes of the whole tensor: gathered, not yet scattered, reduced.
            ranks: the number of processes.
            stride: distance between their global ranks: 8 for the data-parallel groups of a mesh whose inner
                dimension is 8.

        Returns:
            Seconds, 0 for one process.

        Raises:
            SimulationError: if the kind is unknown.
        """
        if kind not in KINDS:
            raise SimulationError(f"no model of {kind!r}; there are models of {', '.join(KINDS)}")
        if ranks <= 1:
            return 0.0
        inside = min(ranks, max(1, self.local // stride))
        machines = math.ceil(ranks / inside)
        if kind == "all_to_all":
            outside = size * (ranks - inside) / ranks / self.bandwidth + (ranks - inside) * self.latency
            return max(
                outside, _ring(size * inside / ranks, inside, self.local_latency, self.local_bandwidth)
            )
        # An all-reduce is a reduce-scatter and an all-gather; a large broadcast costs as much.
        rounds = 2 if kind in ("all_reduce", "broadcast") else 1
        chosen = ALGORITHMS.values() if self.algorithm == "auto" else [ALGORITHMS[self.algorithm]]
        times = [rounds * one(self, size, inside, machines) for one in chosen]
        if rounds == 2 and self.algorithm == "auto":
            times.append(_doubling(self, size, inside, machines))
        return min(times)


_NAMES = [field.name for field in dataclasses.fields(Cluster)]


def _number(value: Any) -> Any:
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(value, str) and number.is_integer() else number


def _ring(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    return (ranks - 1) * latency + size * (ranks - 1) / ranks / bandwidth


def _flat(cluster: Cluster, size: int, inside: int, machines: int) -> float:
    if machines == 1:
        return _ring(size, inside, cluster.local_latency, cluster.local_bandwidth)
    # One ring per adapter of a machine, each through all ranks.
    return _ring(size, inside * machines, cluster.latency, cluster.bandwidth * inside)


def _tree(cluster: Cluster, size: int, inside: int, machines: int) -> float:
    steps = (
        math.ceil(math.log2(machines)) * cluster.latency
        + math.ceil(math.log2(inside)) * cluster.local_latency
    )
    between = size * (machines - 1) / machines / (cluster.bandwidth * inside)
    return steps + between + size * (inside - 1) / inside / cluster.local_bandwidth


def _hierarchical(cluster: Cluster, size: int, inside: int, machines: int) -> float:
    """Each device sends its part between machines; then devices of a machine exchange what they got."""
    between = _ring(size / inside, machines, cluster.latency, cluster.bandwidth)
    return between + _ring(size, inside, cluster.local_latency, cluster.local_bandwidth)


def _doubling(cluster: Cluster, size: int, inside: int, machines: int) -> float:
    """Send everything to a partner, twice as far away in each step: the fewest messages.

    For all-reduces and broadcasts that are small, or between two.
    """
    outside = math.ceil(math.log2(machines)) * (cluster.latency + size / cluster.bandwidth)
    return outside + math.ceil(math.log2(inside)) * (cluster.local_latency + size / cluster.local_bandwidth)


ALGORITHMS: dict[str, Callable[[Cluster, int, int, int], float]] = {
    "ring": _flat,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
