"""Which size of bucket and how many bytes ahead are best for a step, by simulating it with each: what the passes over collectives are to be given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxpasses.distributed.network import Cluster
from fxpasses.distributed.simulate import Group, Simulation, measure, simulate, with_passes
from fxpasses.pass_manager.contract import Pass
from fxpasses.passes import BucketCollectives, OverlapCollectives
from fxpasses.pipeline.capture import Captured

_SMALLEST = 256 << 10
"""Bytes of the smallest bucket that is tried."""
_HALVINGS = 6


@dataclass(frozen=True)
class Schedule:
    """A setting of the passes over collectives.

    Attributes:
        bucket_bytes: of ``bucket_collectives``; 0 for without it.
        ahead_bytes: of ``overlap_collectives``; 0 for without it.
    """

    bucket_bytes: int = 0
    ahead_bytes: int = 0

    def passes(self) -> list[Pass]:
        """The passes, to be put after ``"default"``."""
        bucket = [BucketCollectives(self.bucket_bytes)] if self.bucket_bytes else []
        return [*bucket, *([OverlapCollectives(self.ahead_bytes)] if self.ahead_bytes else [])]

    def specification(self) -> list[str]:
        """The passes as ``options={"passes": ["default", ...]}`` takes them."""
        return [f"{item.name}{{max_bytes={item.max_bytes}}}" for item in self.passes()]  # type: ignore[attr-defined]

    def __str__(self) -> str:
        bucket = f"bucket {_size(self.bucket_bytes)}" if self.bucket_bytes else ""
        ahead = f"ahead {_size(self.ahead_bytes)}" if self.ahead_bytes else ""
        return ", ".join(filter(None, (bucket, ahead))) or "as captured"


@dataclass(frozen=True)
class Candidate:
    """A schedule, the graphs that it makes, and what a step of them takes.

    Attributes:
        schedule: the setting.
        captured: the graphs after its passes.
        measured: seconds of their calls, or None where they were estimated.
        found: the step.
    """

    schedule: Schedule
    captured: Captured
    measured: Mapping[tuple[str, str], float] | None
    found: Simulation


def candidates(
    captured: Captured,
    cluster: Cluster,
    groups: Mapping[str, Group],
    *,
    measures: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """A step as captured, with overlap alone, with buckets from everything in one message down to a 64th of it, and with more or fewer bytes ahead of the best.

    Args:
        captured: the graphs of one rank (:func:`~fxpasses.distributed.capture.capture_rank`).
        cluster: the devices and the network.
        groups: process groups by the names that the graphs give them.
        measures: whether calls are measured on this machine; else they are estimated.
        say: is told which one is simulated.

    Raises:
        SimulationError: as :func:`~fxpasses.distributed.simulate.simulate`.
    """

    def tried(schedule: Schedule) -> Candidate:
        say(f"simulating {schedule}")
        changed = with_passes(captured, schedule.passes())
        measured = measure(changed) if measures else None
        return Candidate(schedule, changed, measured, simulate(changed, cluster, groups, measured))

    plain = tried(Schedule())
    sent: dict[str, int] = {}
    for event in plain.found.events:
        sent[event.graph] = sent.get(event.graph, 0) + event.size
    whole = 1 << math.ceil(math.log2(max(1, *sent.values(), 1)))
    if plain.found.messages < 2:
        return [plain]
    tries = [plain, tried(Schedule(0, whole))]
    sizes = [s for k in range(_HALVINGS + 1) if (s := whole >> k) >= _SMALLEST] or [whole]
    tries += [tried(Schedule(size, 2 * size if size < whole else 0)) for size in sizes]
    size = best(tries, cluster).schedule.bucket_bytes
    return tries + [tried(Schedule(size, n * size)) for n in (0, 4, 8) if 0 < size < whole]


def best(tries: list[Candidate], cluster: Cluster) -> Candidate:
    """The fastest of those that a device has the memory for; where none fits, the one that takes least of it."""
    fit = [one for one in tries if one.found.peak_bytes <= cluster.memory]
    if not fit:
        return min(tries, key=lambda one: one.found.peak_bytes)
    return min(fit, key=lambda one: (one.found.seconds, one.found.peak_bytes))


def _size(size: int) -> str:
    shift, unit = next(
        (unit for unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> unit[0]), (0, "bytes")
    )
    return f"{size >> shift} {unit}"
