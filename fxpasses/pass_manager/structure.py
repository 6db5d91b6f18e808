"""The structure check: is a rewritten graph well formed, with the same memory, effects and metadata?

It is cheap enough to be always on, because it runs nothing. It compares facts about the graph before the pass
(:class:`Facts`) with the graph after it:

* the graph is well formed, and new nodes have the fake values that their calls return
* the inputs are the same; outputs have the same structure, shapes, strides, dtypes, devices and aliasing
* remaining nodes keep the metadata that the contract promises
* all effects and RNG calls are still there, in the same order; only assertions may be added
* the same inputs are mutated, and no others
* no read moves across a write to the same memory, in either direction, through any alias
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fake.seam.fake_tensor import FakeTensor
from fxpasses.errors import StructureError
from fxpasses.graphs.aliasing import AliasInfo, has_effect, is_assertion, is_mutating, uses_rng
from fxpasses.graphs.provenance import locate
from fxpasses.graphs.rewriting import attribute_of, value_of
from fxpasses.pass_manager.memory import Memory, stale_read
from fxpasses.pass_manager.node_metadata import Difference, metadata_difference
from fxpasses.pass_manager.pass_base import GraphKind, Pass
from fxpasses.pass_manager.runs import Snapshot
from fxpasses.pass_manager.sites import MatchSite


class Facts:
    """The facts about a graph that the structure check compares.

    Attributes:
        snapshot: the nodes.
        effects: the nodes with effects, in order.
        rng_calls: the nodes that call the RNG, in order.
        writes: the nodes that write to an argument, in order.
        written_inputs: maps each input and attribute that the graph writes to, by name, to its last write.
        fake_constants: the nodes that read tensors without data.
        memory: which writes each node can see, or ``None`` for a graph without writes.
    """

    def __init__(self, graph: fx.Graph, snapshot: Snapshot | None = None) -> None:
        self.snapshot = Snapshot(graph) if snapshot is None else snapshot
        calls = [entry.node for entry in self.snapshot.entries if entry.node.op == "call_function"]
        with_effect = {
            node.target: has_effect(node) for node in {node.target: node for node in calls}.values()
        }
        self.effects = [node for node in calls if with_effect[node.target]]
        self.rng_calls = [node for node in calls if uses_rng(node)]
        self.writes = [node for node in calls if is_mutating(node)]
        self._aliases = AliasInfo(graph)
        self.written_inputs = {
            root.name: write
            for write in self.writes
            for root in self._aliases.written_by(write)
            if root.op in ("placeholder", "get_attr")
        }
        held = (entry.node for entry in self.snapshot.entries if entry.node.op == "get_attr")
        self.fake_constants = [node for node in held if isinstance(attribute_of(node), FakeTensor)]
        self.memory = Memory(graph, self._aliases, self.writes) if self.writes else None

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """The outputs of the graph, flattened: nodes and constants."""
        found: list[Any] = []
        fx.node.map_aggregate(self.snapshot.output, lambda a: found.append(a) or a)  # type: ignore[func-returns-value]
        return found

    @functools.cached_property
    def output_aliases(self) -> list[tuple[frozenset[str], frozenset[int]] | None]:
        """For each output: the inputs that it may share memory with, and the first outputs that it does."""
        first: dict[fx.Node, int] = {}
        found: list[tuple[frozenset[str], frozenset[int]] | None] = []
        for position, value in enumerate(self.outputs):
            if not isinstance(value, fx.Node):
                found.append(None)
                continue
            roots = self._aliases.roots(value)
            inputs = frozenset(root.name for root in roots if root.op in ("placeholder", "get_attr"))
            found.append((inputs, frozenset(first.setdefault(root, position) for root in roots)))
        return found


def check_structure(
    item: Pass,
    gm: fx.GraphModule,
    kind: GraphKind,
    before: Facts,
    differences: Sequence[Difference],
    sites: tuple[MatchSite, ...] = (),
    made_at: Mapping[fx.Node, int] | None = None,
) -> Facts:
    """Check a graph that ``item`` has changed. Returns the facts about it.

    Args:
        item: the pass.
        gm: the graph after the pass, with updated metadata.
        kind: the kind of graph.
        before: the facts about the graph before the pass.
        differences: the values whose recorded metadata turned out wrong in that update.
        sites: the match sites that the pass claimed.
        made_at: for new nodes, the index of the site that they were created for.

    Raises:
        StructureError: names the pass, the problem, the node, the user's line and the match site.
    """
    comparison = _Comparison(item, kind, before, sites, made_at or {})
    comparison.check_well_formed(gm)
    after = Facts(gm.graph)
    comparison.check_constants(after)
    comparison.check_values(gm, differences)
    comparison.check_inputs(after)
    comparison.check_metadata(after)
    comparison.check_outputs(after)
    comparison.check_order(
        "effect", "effects", before.effects, comparison.without_new_assertions(after.effects)
    )
    if item.contract.numerics != "none":
        comparison.check_order("call of the RNG", "random numbers", before.rng_calls, after.rng_calls)
    comparison.check_writes(after)
    if before.memory is not None or after.memory is not None:
        comparison.check_reads(gm, after)
    return after


_NEIGHBOURS = 64
"""How many nodes around a wrong node are searched for the match site that it belongs to."""


@dataclass
class _Comparison:
    """One run of the check. Every method raises if something is wrong."""

    item: Pass
    kind: GraphKind
    before: Facts
    sites: tuple[MatchSite, ...]
    made_at: Mapping[fx.Node, int]

    def check_well_formed(self, gm: fx.GraphModule) -> None:
        try:
            gm.graph.lint()
        except Exception as error:
            reason = f"the graph is not well formed afterwards: {error}"
            raise self._error("lint", reason, None) from error
        backwards = list(reversed(gm.graph.nodes))
        astray = next((node for node in gm.graph.nodes if node not in set(backwards)), None)
        if astray is not None:
            reason = f"node {astray.name!r} stands beside one that had been erased, and is in the graph when it is read forwards alone: insert nodes before others are erased"
            raise self._error("lint", reason, astray)

    def check_constants(self, after: Facts) -> None:
        """Reject new fake constants. A tensor that a pass creates during tracing is fake."""
        for node in after.fake_constants:
            if node.name not in {old.name for old in self.before.fake_constants}:
                reason = f"its constant {node.target} is a fake tensor, which holds no data: tensors that a pass makes are traced, as the graph is"
                raise self._error("metadata", reason, node)

    def check_values(self, gm: fx.GraphModule, differences: Sequence[Difference]) -> None:
        """New nodes, and nodes whose value the pass has set, must have the value that their call returns."""
        known = self.before.snapshot.by_node
        for found in differences:
            old = known.get(found.node)
            if (old is None or old.value is not found.recorded) and not found.follows:
                reason = f"its recorded value is not what the call gives: {found.problem}; make nodes with fxpasses.insert_call"
                raise self._error("metadata", reason, found.node)
        has_values = any(entry.value is not None for entry in self.before.snapshot.entries)
        for node in gm.graph.nodes if has_values else ():
            if node.op == "call_function" and "val" not in node.meta and node.users:
                old = known.get(node)
                if old is None or old.value is not None:
                    reason = "a new node has no fake value, and none can be computed; make nodes with fxpasses.insert_call"
                    raise self._error("metadata", reason, node)

    def check_inputs(self, after: Facts) -> None:
        """The graph must take the same inputs, in the same order."""
        was, now = (
            [entry.name for entry in snapshot.entries if entry.node.op == "placeholder"]
            for snapshot in (self.before.snapshot, after.snapshot)
        )
        if was != now:
            reason = f"the graph took the inputs {', '.join(was)} before and takes {', '.join(now)} now"
            raise self._error("inputs", reason, None)

    def check_outputs(self, after: Facts) -> None:
        was, now = self.before.outputs, after.outputs
        if len(was) != len(now) or _shape(self.before.snapshot.output) != _shape(after.snapshot.output):
            reason = f"the graph returned {len(was)} values before and returns {len(now)} now"
            if len(was) == len(now):
                reason = "the graph returns its values in another structure"
            raise self._error("outputs", reason, None)
        values = self.before.snapshot.by_node
        for position, (a, b) in enumerate(zip(was, now, strict=True)):
            a_value = values[a].value if isinstance(a, fx.Node) else a
            b_value = value_of(b) if isinstance(b, fx.Node) else b
            if (a is None) != (b is None):
                reason = f"output {position} was {_describe(a_value)} and is {_describe(b_value)}"
                raise self._error("outputs", reason, _node_to_report(b, a))
            if (problem := metadata_difference(a_value, b_value)) is not None:
                reason = f"output {position}: {problem}"
                raise self._error("outputs", reason, _node_to_report(b, a))
        for position, (a, b) in enumerate(zip(was, now, strict=True)):
            if self._is_moved(position, a, b, now):
                reason = f"output {position} was {a.name}, which is output {now.index(a)} now"
                raise self._error("outputs", reason, b)
        for position, (a_memory, b_memory) in enumerate(
            zip(self.before.output_aliases, after.output_aliases, strict=True)
        ):
            if a_memory != b_memory:
                was_own, is_now = _describe_aliases(position, a_memory), _describe_aliases(position, b_memory)
                reason = f"output {position} {was_own} before, and {is_now} now"
                raise self._error("aliasing", reason, _node_to_report(now[position], was[position]))

    def _is_moved(self, position: int, a: Any, b: Any, now: list[Any]) -> bool:
        """Whether an output was swapped with another one."""
        if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a not in now:
            return False
        was = self.before.outputs
        return b in was and was.count(a) == now.count(a) and was.count(b) == now.count(b)

    def check_metadata(self, after: Facts) -> None:
        """Remaining nodes must keep the metadata that the contract promises."""
        promise = self.item.contract.metadata
        known = self.before.snapshot.by_node
        for entry in after.snapshot.entries:
            old = known.get(entry.node)
            if old is None or old.value is entry.value or entry.value is None or old.target != entry.target:
                continue
            if entry.node.op == "placeholder":
                problem = metadata_difference(old.value, entry.value)
            elif promise == "outputs":
                continue
            else:
                problem = metadata_difference(old.value, entry.value, strides=promise == "exact")
            if problem is not None:
                reason = (
                    f"{problem}, but the contract says metadata={promise!r}: nodes that stay keep "
                    f"{'shape, dtype, device and stride' if promise == 'exact' else 'shape, dtype and device'}"
                )
                raise self._error("metadata", reason, entry.node)

    def check_order(self, one: str, many: str, was: list[fx.Node], now: list[fx.Node]) -> None:
        """Compare calls whose order matters. A new call may replace a removed one if it is the same call.

        Args:
            one: one such call, in words.
            many: several such calls, in words.
            was: the calls before, in order.
            now: the calls of the rewritten graph, in order.

        Raises:
            StructureError: if a call was removed, added or moved.
        """
        if was == now:
            return
        present, known = set(now), set(was)
        if [n for n in was if n in present] != [n for n in now if n in known]:
            kept = [n for n in was if n in present]
            moved = next(a for a, b in zip(kept, [n for n in now if n in known], strict=True) if a is not b)
            raise self._error("order", f"{many} come in another order than before", moved)
        before_calls = [self._call(self.before.snapshot, n) for n in was]
        now_calls = [(str(n.target), _describe(value_of(n))) for n in now]
        if before_calls == now_calls:
            return
        gone = next((n for n in was if n not in present), None)
        article = "an" if one[0] in "aeiou" else "a"
        if len(now) < len(was):
            raise self._error("order", f"{article} {one} is gone: {len(was)} before, {len(now)} now", gone)
        new = next((n for n in now if n not in known), gone)
        if len(now) > len(was) and new is not None:
            raise self._error("order", f"{article} {one} is new: {len(was)} before, {len(now)} now", new)
        raise self._error("order", f"the {many} are not the same as before", new)

    def without_new_assertions(self, now: list[fx.Node]) -> list[fx.Node]:
        """The effects without added assertions, which do nothing while they hold: a question of values."""
        was = self.before.effects
        more = Counter(str(n.target) for n in now) - Counter(
            self._call(self.before.snapshot, n)[0] for n in was
        )
        known, kept = set(was), []
        for node in reversed(now):
            if node not in known and is_assertion(node) and more[str(node.target)]:
                more[str(node.target)] -= 1
            else:
                kept.append(node)
        return kept[::-1]

    def _call(self, snapshot: Snapshot, node: fx.Node) -> tuple[str, str]:
        entry = snapshot.by_node[node]
        return str(entry.target), _describe(entry.value)

    def check_writes(self, after: Facts) -> None:
        was, now = self.before.written_inputs, after.written_inputs
        for root in was.keys() - now.keys():
            raise self._error("mutation", f"input {root!r} is not written to any more", was[root])
        for root in now.keys() - was.keys():
            raise self._error("mutation", f"input {root!r} is written to now", now[root])

    def check_reads(self, gm: fx.GraphModule, after: Facts) -> None:
        found = stale_read(gm.graph, self.before.snapshot, self.before.memory, after.memory)
        if found is not None:
            node, reason = found
            raise self._error("stale alias", reason, node)

    def _error(self, problem: str, reason: str, node: Any) -> StructureError:
        location = locate(node) if isinstance(node, fx.Node) else None
        site = self._site_of(node) if isinstance(node, fx.Node) else None
        if site is None and len(applied := [s for s in self.sites if s.applied]) == 1:
            site = applied[0]
        where = f" ({site})" if site is not None else ""
        return StructureError(
            reason + where,
            location,
            pass_name=self.item.name,
            graph=self.kind,
            problem=problem,
            site=site.index if site is not None else None,
        )

    def _site_of(self, node: fx.Node) -> MatchSite | None:
        """The site that a node was created for or claimed as, or that of the nearest such node."""
        by_name = {site.location.node: site for site in self.sites if site.applied}
        pending, seen = [node], {node}
        while pending and len(seen) < _NEIGHBOURS:
            current = pending.pop(0)
            if (index := self.made_at.get(current)) is not None:
                return self.sites[index]
            if current.name in by_name:
                return by_name[current.name]
            for other in (*current.all_input_nodes, *current.users):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        return None


def _shape(argument: Any) -> Any:
    """The nesting of an output."""
    if isinstance(argument, (list, tuple)):
        return [_shape(a) for a in argument]
    return {k: _shape(v) for k, v in argument.items()} if isinstance(argument, dict) else None


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    return type(value).__name__


def _describe_aliases(position: int, memory: tuple[frozenset[str], frozenset[int]] | None) -> str:
    """Describe what an output shares memory with."""
    if memory is None:
        return "was no tensor"
    inputs, outputs = memory
    shared = [f"input {name!r}" for name in sorted(inputs)]
    shared += [f"output {other}" for other in sorted(outputs) if other != position and not inputs]
    return f"shared memory with {', '.join(shared)}" if shared else "had memory of its own"


def _node_to_report(new: Any, old: Any) -> Any:
    """The node to name for an output: the current one, or the previous one if only that has a user's line."""
    if isinstance(old, fx.Node) and not (isinstance(new, fx.Node) and locate(new).source):
        return old
    return new
