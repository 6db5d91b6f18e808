"""Simulate a training step: run the captured graphs on a clock instead of a device.

Each device has a compute stream, and a stream per process group, in which collectives run one after another.
A collective starts when it has been called and its group is free; ``wait_tensor`` waits for its end. Memory
counts live values: inputs all the time, everything else from its call to its last use, and the input of a
collective until it is waited for.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fake.dispatch.communication import communicates
from fxpasses.distributed.network import KINDS, Cluster
from fxpasses.errors import SimulationError
from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import copy_graph, value_of
from fxpasses.partitioner.cost import CostModel, is_getitem
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pipeline.capture_graphs import Captured
from fxpasses.regional import communicating_graph, region_work


@dataclass(frozen=True)
class Group:
    """A process group in its real size.

    Attributes:
        ranks: its number of processes.
        stride: distance between their global ranks.
        name: the name of the mesh dimension, for people.
    """

    ranks: int
    stride: int = 1
    name: str = ""


@dataclass(frozen=True)
class Event:
    """Something that takes time.

    Attributes:
        stream: ``"compute"``, ``"wait"``, or the name of a process group.
        name: the name of the node.
        graph: ``"forward"`` or ``"backward"``.
        start: seconds since the start of the step.
        seconds: how long it takes.
        size: bytes of the message, 0 for anything else.
    """

    stream: str
    name: str
    graph: str
    start: float
    seconds: float
    size: int = 0


@dataclass
class Simulation:
    """The time and memory of a step.

    Attributes:
        seconds: duration of the whole step.
        compute: seconds in which the device computes.
        network: seconds in which messages are in flight, summed over groups.
        exposed: seconds in which the device waits for messages.
        messages: number of collectives.
        peak_bytes: peak memory, including inputs (parameters).
        input_bytes: bytes of parameters, buffers and inputs.
        peak_at: the node at the peak.
        alive: what is alive then, largest first: name and bytes.
        events: everything that takes time, in order.
        memory: seconds since the start, and the bytes that are live from then on.
    """

    seconds: float = 0.0
    compute: float = 0.0
    network: float = 0.0
    exposed: float = 0.0
    messages: int = 0
    peak_bytes: int = 0
    input_bytes: int = 0
    peak_at: str = ""
    alive: tuple[tuple[str, int], ...] = ()
    events: list[Event] = field(default_factory=list, repr=False)
    memory: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def timeline(self) -> dict[str, Any]:
        """Return the timeline for a report page: stream names, memory, and event rows.

        A row is (stream, node, graph, start, seconds, bytes).
        """
        streams = sorted(
            {event.stream for event in self.events},
            key=lambda name: (name != "compute", name != "wait", name),
        )
        rows = [
            [streams.index(e.stream), e.name, e.graph, round(e.start, 9), round(e.seconds, 9), e.size]
            for e in self.events
        ]
        return {"streams": streams, "events": rows, "memory": self.memory}

    def trace(self) -> dict[str, Any]:
        """Return the timeline in Trace Event Format (microseconds) for Perfetto and ``chrome://tracing``."""
        streams = list(dict.fromkeys(event.stream for event in self.events))
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
            for number, stream in enumerate(streams)
        ]
        spans = [
            {
                "ph": "X", "name": event.name, "cat": event.graph, "pid": 0, "tid": streams.index(event.stream),
                "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": {"bytes": event.size},
            }
            for event in self.events
        ]  # fmt: skip
        return {"traceEvents": named + spans, "displayTimeUnit": "ms"}


def simulate(
    captured: Captured,
    cluster: Cluster,
    groups: Mapping[str, Group],
    measured: Mapping[tuple[str, str], float] | None = None,
) -> Simulation:
    """Simulate one step of one rank: forward, then backward if there is one.

    Args:
        captured: its graphs; symbolic sizes count by their hints.
        cluster: the devices and their network.
        groups: process groups by their names in the graphs.
        measured: seconds by graph and node (:func:`measure`). Without them, each node takes the longer of its
            operations and its bytes (the roofline model: Williams, Waterman, Patterson 2009), at least one
            launch.

    Raises:
        SimulationError: for a collective without a model, or of an unknown group; names the node.
    """
    return _Rank(cluster, groups, measured).step(captured)


def simulate_graph(gm: fx.GraphModule, cluster: Cluster, groups: Mapping[str, Group]) -> Simulation:
    """Simulate a single graph whose inputs live all the time. Regions that it calls count call by call.

    Args:
        gm: the graph.
        cluster: the devices and their network.
        groups: process groups by their names in the graph.

    Raises:
        SimulationError: for a collective without a model, or of an unknown group; names the node.
    """
    return _Rank(cluster, groups, None).graph(gm)


def with_passes(captured: Captured, passes: Sequence[Pass]) -> Captured:
    """Return a copy of a capture after running passes on its forward and backward graph."""
    forward, backward = copy_graph(captured.forward), captured.backward and copy_graph(captured.backward)
    manager = PassManager(passes)
    manager.run(forward, "forward" if backward is not None else "inference")
    if backward is not None:
        manager.run(backward, "backward")
    return dataclasses.replace(captured, forward=forward, backward=backward)


def measure(
    captured: Captured, rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[str, str], float]:
    """Measure each call's seconds on this machine, on made-up values and without collectives.

    Args:
        captured: its graphs, with static sizes.
        rounds: number of runs; the median counts.
        clock: returns the time in seconds.

    Raises:
        SimulationError: if a size is symbolic; names the input.
    """
    found: dict[tuple[str, str], float] = {}
    for kind, gm in _graphs(captured):
        taken: dict[str, list[float]] = {}
        inputs = [_filled_value(node) for node in gm.graph.nodes if node.op == "placeholder"]
        for _ in range(rounds):
            _Stopwatch(gm, taken, clock).run(*inputs)
        found |= {(kind, name): statistics.median(times) for name, times in taken.items()}
    return found


class _Stopwatch(fx.Interpreter):
    """Runs a graph call by call, and records how long each takes. Results of collectives are made up."""

    def __init__(self, gm: fx.GraphModule, taken: dict[str, list[float]], clock: Callable[[], float]) -> None:
        super().__init__(gm)
        self._taken, self._clock = taken, clock

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and communicates(n.target):
            return _filled_value(n)
        start = self._clock()
        result = super().run_node(n)
        if n.op == "call_function":
            self._taken.setdefault(n.name, []).append(self._clock() - start)
        return result


def _filled_value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        raise SimulationError(f"{node.name} has a symbolic size: capture with dynamic=False to measure")
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.fill_(0.5) if made.is_floating_point() else made.zero_()


def _graphs(captured: Captured) -> Iterator[tuple[str, fx.GraphModule]]:
    yield "forward", captured.forward
    if captured.backward is not None:
        yield "backward", captured.backward


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds in which the device computes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """A message of a process group.

    Attributes:
        key: identifies it to its wait.
        collective: one of :data:`~fxpasses.distributed.network.KINDS`.
        group: the process group.
        name: the name of the group.
        size: bytes of the whole tensor.
        seconds: how long it is in flight.
    """

    key: Any
    collective: str
    group: Group
    name: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for a message: the key of its :class:`Send`."""

    key: Any


class Steps:
    """The steps of calls that take time, measured or estimated."""

    def __init__(
        self,
        cluster: Cluster,
        groups: Mapping[str, Group],
        measured: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        """Args: devices and network, process groups by their names in graphs, seconds by graph and node."""
        self._cluster, self._groups, self._measured = cluster, groups, measured
        self._costs = CostModel()

    def of(self, node: fx.Node, kind: str = "graph") -> Iterator[tuple[fx.Node, Compute | Send | Wait]]:
        """Yield the steps of a call with their nodes, one by one for a region that communicates.

        Args:
            node: the call.
            kind: the kind of its graph, as in the measurements.

        Raises:
            SimulationError: for a collective without a model, or of an unknown group; names the node.
        """
        region = communicating_graph(node)
        if region is not None:
            for inner in region.nodes:
                if inner.op == "call_function":
                    yield from self.of(inner, kind)
        elif not communicates(node.target):
            if seconds := self._seconds(kind, node):
                yield node, Compute(seconds)
        elif _name(node) == "wait_tensor":
            yield node, Wait(node.args[0])
        else:
            yield node, self._message(node)

    def _message(self, node: fx.Node) -> Send:
        collective = next((k for k in KINDS if _name(node).startswith(k)), None)
        group = self._groups.get(str(node.args[-1]))
        if collective is None or group is None:
            what = f"no model of {node.target}" if collective is None else f"unknown group {node.args[-1]!r}"
            raise SimulationError(f"{node.name}: {what}; there are models of {', '.join(KINDS)}")
        size = max(self._costs.bytes_of(n) for n in (node, *node.all_input_nodes))
        seconds = self._cluster.seconds(collective, size, group.ranks, group.stride)
        return Send(node, collective, group, group.name or str(node.args[-1]), size, seconds)

    def _seconds(self, kind: str, node: fx.Node) -> float:
        if self._measured is not None:
            return self._measured.get((kind, node.name), 0.0)
        work = region_work(node)
        if work is None:
            own = self._costs.flops_and_bytes(node)
            work = [] if own is None else [own]
        return sum(self._cluster.compute_seconds(flops, moved) for flops, moved in work)


class Clock:
    """The time of one rank: its device, and one stream per process group."""

    def __init__(self) -> None:
        self.found = Simulation()
        self._free_at: dict[str, float] = {}
        self._arrives: dict[Any, float] = {}

    def take(self, step: Compute | Send | Wait) -> tuple[str, float, float, int] | None:
        """Take one step. Returns stream, start, seconds and bytes of what it occupies, if anything."""
        found = self.found
        start = found.seconds
        if isinstance(step, Compute):
            found.compute += step.seconds
            found.seconds += step.seconds
            return "compute", start, step.seconds, 0
        if isinstance(step, Wait):
            waits = self._arrives.get(step.key, 0.0) - start
            if waits <= 0:
                return None
            found.exposed += waits
            found.seconds += waits
            return "wait", start, waits, 0
        start = max(start, self._free_at.get(step.name, 0.0))
        self._free_at[step.name] = self._arrives[step.key] = start + step.seconds
        found.messages += 1
        found.network += step.seconds
        return step.name, start, step.seconds, step.size


class _Rank:
    """Time and memory of one rank while its graphs run."""

    def __init__(
        self, cluster: Cluster, groups: Mapping[str, Group], measured: Mapping[tuple[str, str], float] | None
    ) -> None:
        self._steps, self._clock, self._costs = Steps(cluster, groups, measured), Clock(), CostModel()
        self._alive: dict[fx.Node, int] = {}
        self._bytes = 0
        self.found = self._clock.found

    def step(self, captured: Captured) -> Simulation:
        inputs = [node for node in captured.forward.graph.nodes if node.op == "placeholder"]
        self._bytes = self.found.input_bytes = sum(map(self._costs.bytes_of, inputs))
        forward = AliasInfo(captured.forward.graph)
        self._run_graph("forward", captured.forward, forward, dict.fromkeys(inputs, 0))
        if captured.backward is not None:
            given = _tensors(n for n in captured.backward.graph.nodes if n.op == "placeholder")
            outputs: Any = captured.forward.graph.output_node().args[0]
            saved = _tensors(outputs[captured.num_outputs :])
            sizes = {}
            for node, source in zip(given, saved, strict=False):
                sizes[node] = sum(self._alive.pop(root, 0) for root in _memory(source, forward))
            self._bytes -= sum(self._alive.values())  # the user's outputs: few, and freed with the loss
            self._alive.clear()
            self._run_graph("backward", captured.backward, AliasInfo(captured.backward.graph), sizes)
        return self.found

    def graph(self, gm: fx.GraphModule) -> Simulation:
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._bytes = self.found.input_bytes = sum(map(self._costs.bytes_of, inputs))
        self._run_graph("graph", gm, AliasInfo(gm.graph), dict.fromkeys(inputs, 0))
        return self.found

    def _run_graph(
        self, kind: str, gm: fx.GraphModule, aliases: AliasInfo, inputs: Mapping[fx.Node, int]
    ) -> None:
        """Run one graph. ``inputs`` maps inputs to the bytes that are freed after their last use."""
        last = _last_uses(gm.graph, aliases)
        self._alive.update(inputs)
        for node in gm.graph.nodes:
            if node.op == "placeholder" and node not in inputs and kind == "backward":
                self._allocate(node)  # a tangent
            if node.op == "call_function":
                self._call(kind, node)
                if _memory(node, aliases) == {node} and not is_getitem(node):
                    self._allocate(node)
            self._note_memory()
            for root in last.get(node, ()):
                self._bytes -= self._alive.pop(root, 0)
            self._note_memory()

    def _note_memory(self) -> None:
        if self.found.memory[-1:] != [(self.found.seconds, self._bytes)]:
            self.found.memory.append((self.found.seconds, self._bytes))

    def _allocate(self, node: fx.Node) -> None:
        size = self._alive[node] = self._costs.bytes_of(node)
        self._bytes += size
        if self._bytes > self.found.peak_bytes:
            self.found.peak_bytes, self.found.peak_at = self._bytes, node.name
            largest = sorted(self._alive.items(), key=lambda item: -item[1])[:5]
            self.found.alive = tuple((n.name, size) for n, size in largest if size)

    def _call(self, kind: str, node: fx.Node) -> None:
        for inner, step in self._steps.of(node, kind):
            taken = self._clock.take(step)
            if taken is not None:
                stream, start, seconds, size = taken
                self.found.events.append(Event(stream, inner.name, kind, start, seconds, size))


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _tensors(nodes: Any) -> list[fx.Node]:
    return [n for n in nodes if isinstance(n, fx.Node) and isinstance(value_of(n), torch.Tensor)]


def _memory(node: fx.Node, aliases: AliasInfo) -> set[fx.Node]:
    """Return the calls whose memory a value is in. The result of a wait is in that of its collective."""
    found: set[fx.Node] = set()
    for root in aliases.roots(node):
        waits = root.op == "call_function" and _name(root) == "wait_tensor"
        found |= _memory(root.args[0], aliases) if waits else {root}  # type: ignore[arg-type]
    return found


def _last_uses(graph: fx.Graph, aliases: AliasInfo) -> dict[fx.Node, list[fx.Node]]:
    """Return the memory (roots) that each node is the last to use, except memory that the graph returns."""
    last: dict[fx.Node, fx.Node] = {}
    returned: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            returned = set().union(*(_memory(n, aliases) for n in node.all_input_nodes))
            continue
        for used in (node, *node.all_input_nodes):
            # A collective reads its input until it is waited for.
            sources = used.all_input_nodes if used.op == "call_function" and communicates(used.target) else []
            for source in (used, *sources):
                last.update(dict.fromkeys(_memory(source, aliases), node))
    found: dict[fx.Node, list[fx.Node]] = {}
    for root, node in last.items():
        if root not in returned:
            found.setdefault(node, []).append(root)
    return found
