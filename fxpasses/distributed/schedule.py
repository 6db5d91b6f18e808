"""Find the best bucket size and bytes ahead by simulating a step, or in a pass each compiled graph."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, TypeVar

from torch import fx

from fake.dispatch.communication import communicates
from fake.seam.distributed_c10d import ranks_of
from fxpasses.distributed.draft import Draft, Sheet
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.simulate import Group, Simulation, measure, simulate, with_passes
from fxpasses.errors import SimulationError
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.passes import BucketCollectives, OverlapCollectives
from fxpasses.pipeline.capture_graphs import Captured
from fxpasses.regional import communicating_graph

log = logging.getLogger(__name__)

_SMALLEST = 256 << 10
"""Size in bytes of the smallest bucket to try."""
_HALVINGS = 6


@dataclass(frozen=True)
class Schedule:
    """A setting of the passes over collectives.

    Attributes:
        bucket_bytes: ``max_bytes`` of ``bucket_collectives``; 0 to omit it.
        ahead_bytes: ``max_bytes`` of ``overlap_collectives``; 0 to omit it.
    """

    bucket_bytes: int = 0
    ahead_bytes: int = 0

    def passes(self) -> list[Pass]:
        """Return the passes, to be run after ``"default"``."""
        bucket = [BucketCollectives(self.bucket_bytes)] if self.bucket_bytes else []
        return [*bucket, *([OverlapCollectives(self.ahead_bytes)] if self.ahead_bytes else [])]

    def specification(self) -> list[str]:
        """Return the passes in the form that ``options={"passes": ["default", ...]}`` takes."""
        return [f"{item.name}{{max_bytes={item.max_bytes}}}" for item in self.passes()]  # type: ignore[attr-defined]

    def __str__(self) -> str:
        bucket = f"bucket {_size(self.bucket_bytes)}" if self.bucket_bytes else ""
        ahead = f"ahead {_size(self.ahead_bytes)}" if self.ahead_bytes else ""
        return ", ".join(filter(None, (bucket, ahead))) or "as captured"


Graphs = TypeVar("Graphs", Captured, fx.GraphModule)


@dataclass(frozen=True)
class Candidate(Generic[Graphs]):
    """A schedule, the graphs that it makes, and a simulation of their step.

    Attributes:
        schedule: the setting.
        captured: the graphs after its passes; in a pass, the unchanged graph.
        measured: seconds of their calls, or None if they were estimated.
        found: the simulated step.
    """

    schedule: Schedule
    captured: Graphs
    measured: Mapping[tuple[str, str], float] | None
    found: Simulation


def candidates(
    captured: Captured,
    cluster: Cluster,
    groups: Mapping[str, Group],
    *,
    measures: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Candidate[Captured]]:
    """Simulate a step under several schedules.

    These are: as captured, overlap alone, buckets from everything in one message down to a 64th of it, and
    more or fewer bytes ahead of the best.

    Args:
        captured: the graphs of one rank (:func:`~fxpasses.distributed.capture.capture_rank`).
        cluster: the devices and the network.
        groups: process groups by their names in the graphs.
        measures: whether to measure calls on this machine instead of estimating them.
        say: called with a message for each simulation.

    Raises:
        SimulationError: as :func:`~fxpasses.distributed.simulate.simulate`.
    """

    def tried(schedule: Schedule) -> Candidate[Captured]:
        say(f"simulating {schedule}")
        changed = with_passes(captured, schedule.passes())
        measured = measure(changed) if measures else None
        return Candidate(schedule, changed, measured, simulate(changed, cluster, groups, measured))

    return _search(tried, cluster)


def _search(tried: Callable[[Schedule], Candidate[Graphs]], cluster: Cluster) -> list[Candidate[Graphs]]:
    plain = tried(Schedule())
    sent = Counter[str]()
    for event in plain.found.events:
        sent[event.graph] += event.size
    whole = 1 << math.ceil(math.log2(max(1, *sent.values(), 1)))
    if plain.found.messages < 2:
        return [plain]
    tries = [plain, tried(Schedule(0, whole))]
    sizes = [s for k in range(_HALVINGS + 1) if (s := whole >> k) >= _SMALLEST] or [whole]
    tries += [tried(Schedule(size, 2 * size if size < whole else 0)) for size in sizes]
    size = best(tries, cluster).schedule.bucket_bytes
    return tries + [tried(Schedule(size, n * size)) for n in (0, 4, 8) if 0 < size < whole]


def best(tries: list[Candidate[Graphs]], cluster: Cluster) -> Candidate[Graphs]:
    """Return the fastest candidate that fits a device's memory, or the one that needs the least."""
    fit = [one for one in tries if one.found.peak_bytes <= cluster.memory]
    if not fit:
        return min(tries, key=lambda one: one.found.peak_bytes)
    return min(fit, key=lambda one: (one.found.seconds, one.found.peak_bytes))


def _size(size: int) -> str:
    shift, unit = next(
        (unit for unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> unit[0]), (0, "bytes")
    )
    return f"{size >> shift} {unit}"


@dataclass(frozen=True)
class ScheduleCollectives(Pass):
    """Bucket and overlap each graph's collectives in the best simulated way, within a device's memory.

    Before::

        passes = ["bucket_collectives{max_bytes=4194304}", "overlap_collectives{max_bytes=8388608}"]
        options = {"passes": ["default", *passes]}

    After::

        options = {"passes": ["default", ScheduleCollectives(Cluster(latency=8e-3, bandwidth=200e6))]}

    Every rank decides for itself, from only the graph and the cluster, so equal graphs get equal schedules.
    Times are estimated (roofline), not measured. Ranks with different sizes may decide differently, and are
    told so before anything is sent (``ranks="check"``).

    Attributes:
        cluster: the devices and their network.
    """

    name: ClassVar[str] = "schedule_collectives"
    contract: ClassVar[Contract] = Contract(("forward", "backward", "inference"), numerics="tolerance")
    cluster: Cluster = field(default_factory=Cluster)

    def apply(self, gm: fx.GraphModule) -> bool:
        groups = _groups_of(gm.graph)
        if not groups:
            return False

        try:
            sheet = Sheet(gm.graph, self.cluster, groups)
            chosen = best(_search(partial(_simulate_draft, gm, sheet), self.cluster), self.cluster)
        except SimulationError as error:
            log.warning("collectives are left as they are: %s", error)
            return False
        log.info("collectives of a graph: %s, %.6f s", chosen.schedule, chosen.found.seconds)
        changed = [item.apply(gm) for item in chosen.schedule.passes()]
        return any(changed)


def _simulate_draft(gm: fx.GraphModule, sheet: Sheet, schedule: Schedule) -> Candidate[fx.GraphModule]:
    found = Draft(sheet).scheduled(schedule.bucket_bytes, schedule.ahead_bytes)
    return Candidate(schedule, gm, None, found)


def _groups_of(graph: fx.Graph) -> dict[str, Group]:
    """Return the process groups in which a graph, or a region it calls, communicates, by name."""
    found: dict[str, Group] = {}
    for node in _collectives(graph):
        name = str(node.args[-1])
        ranks = ranks_of(name)
        if name not in found:
            found[name] = Group(
                len(ranks), min((b - a for a, b in itertools.pairwise(ranks)), default=1), name
            )
    return found


def _collectives(graph: fx.Graph) -> Iterable[fx.Node]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        region = communicating_graph(node)
        if region is not None:
            yield from _collectives(region)
        elif communicates(node.target) and len(node.args) > 1:  # all except waits
            yield node
