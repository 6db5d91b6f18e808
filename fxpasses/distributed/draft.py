"""Estimate what a schedule would make of a graph, without making it.

Calls are items with seconds, bytes and dependencies, which are bucketed and moved. The decisions are those of
:mod:`fxpasses.passes.bucket_collectives` and :mod:`~fxpasses.passes.overlap_collectives`, step by step.
Running those would copy the graph for each candidate and compute the values of new nodes, which takes a
hundred times as long. Tests compare both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fake.dispatch.communication import communicates
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.simulate import Clock, Compute, Event, Group, Send, Simulation, Steps, Wait
from fxpasses.graphs.aliasing import AliasInfo, aliased_arguments, is_random
from fxpasses.graphs.rewriting import value_of
from fxpasses.partitioner.cost import CostModel, is_getitem
from fxpasses.passes._matching import is_pure, is_pure_rng_call
from fxpasses.passes.bucket_collectives import GATHER, REDUCE, SCATTER, fits_a_bucket, kind_of
from fxpasses.passes.overlap_collectives import WAIT, copies, may_move


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What does not depend on the order of calls.

    Attributes:
        steps: what takes time.
        size: bytes of memory that it allocates.
        aliased: indices of the inputs whose memory the value is in.
        is_input: whether it is a graph input, whose memory lives all the time.
        is_communication: whether it is a collective or a wait.
        waits: whether it is a wait.
        copies: whether it packs or unpacks messages, and may be moved anywhere.
        pure: whether it may be moved before other calls.
        random: whether it uses the RNG.
        read: for a collective, the bytes that it reads.
        kind: for one that may be bucketed, its operator and all else that must be equal; otherwise None.
        dtype: the dtype of what it sends.
        movable: for a collective, whether it may be started earlier.
        is_written: whether some call writes to the memory that it reads.
        is_returned: whether its result is returned.
    """

    steps: tuple[Compute | Send | Wait, ...] = ()
    size: int = 0
    aliased: tuple[int, ...] = ()
    is_input: bool = False
    is_communication: bool = False
    waits: bool = False
    copies: bool = False
    pure: bool = True
    random: bool = False
    read: int = 0
    kind: Any = None
    dtype: torch.dtype = torch.float32
    movable: bool = False
    is_written: bool = False
    is_returned: bool = False

    @property
    def whole(self) -> int:
        """Bytes of the whole (gathered, unreduced) tensor."""
        return max(self.read, self.size)


class _Item:
    """A call of a draft. Items form a linked list, along which ``order`` grows."""

    __slots__ = ("after", "before", "facts", "inputs", "order", "users")

    def __init__(self, facts: _Facts, inputs: list[_Item], order: float) -> None:
        self.facts, self.inputs, self.order = facts, inputs, order
        self.users: dict[_Item, None] = {}
        self.before: _Item = self
        self.after: _Item = self


class Sheet:
    """A graph from which drafts are made."""

    def __init__(self, graph: fx.Graph, cluster: Cluster, groups: Mapping[str, Group]) -> None:
        """Record the costs of a graph's calls.

        Args:
            graph: the graph, which is not changed.
            cluster: the devices and their network.
            groups: process groups by their names in the graph.

        Raises:
            SimulationError: for a collective without a model, or of an unknown group; names the node.
        """
        self.cluster = cluster
        costs, aliases, steps = CostModel(), AliasInfo(graph), Steps(cluster, groups)
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        self.facts = [_facts_of(node, costs, aliases, steps) for node in graph.nodes]
        self.inputs = [[numbers[n] for n in node.all_input_nodes] for node in graph.nodes]
        self.input_bytes = sum(map(costs.bytes_of, graph.find_nodes(op="placeholder")))

    def message(self, key: Any, like: Send, size: int) -> Send:
        """Make a message like another one, with its own key and size.

        Args:
            key: identifies it to its wait.
            like: the other message.
            size: its bytes, of the whole tensor.
        """
        seconds = self.cluster.seconds(like.collective, size, like.group.ranks, like.group.stride)
        return dataclasses.replace(like, key=key, size=size, seconds=seconds)


def _facts_of(node: fx.Node, costs: CostModel, aliases: AliasInfo, steps: Steps) -> _Facts:
    if node.op != "call_function":
        return _Facts(is_input=node.op == "placeholder", pure=node.op == "get_attr")
    is_communication = communicates(node.target)
    inputs = node.all_input_nodes
    aliased = tuple(inputs.index(n) for n in aliased_arguments(node))
    fresh = not aliased and not is_getitem(node) and node.target is not WAIT
    facts: dict[str, Any] = {}
    if is_communication and node.target is not WAIT:
        (wait,) = users if len(users := list(node.users)) == 1 else (None,)
        joins = node.target in (GATHER, REDUCE, SCATTER) and fits_a_bucket(node)
        if may_move(node, aliases) or joins:
            source = value_of(node.args[0])  # type: ignore[arg-type]
            facts = {"read": source.nbytes, "dtype": source.dtype, "movable": may_move(node, aliases)}
        if joins:
            facts["kind"] = kind_of(node)
            facts["is_written"] = bool(aliases.roots(node.args[0]) & aliases.mutated)  # type: ignore[arg-type]
            facts["is_returned"] = wait is not None and bool(aliases.roots(wait) & aliases.output)
    return _Facts(
        steps=tuple(step for _, step in steps.of(node)),
        size=costs.bytes_of(node) if fresh else 0,
        aliased=aliased,
        is_communication=is_communication,
        waits=node.target is WAIT,
        copies=copies(node, aliases),
        pure=is_pure(node) or is_pure_rng_call(node),
        random=is_random(node),
        **facts,
    )


class Draft:
    """A candidate: the calls of a sheet, in their own order."""

    def __init__(self, sheet: Sheet) -> None:
        """Args: the sheet, which is not changed."""
        self._sheet = sheet
        items = [_Item(facts, [], float(number)) for number, facts in enumerate(sheet.facts)]
        self._end = previous = _Item(_Facts(pure=False), [], float(len(items)))
        for item, numbers in zip(items, sheet.inputs, strict=True):
            item.inputs = [items[number] for number in numbers]
            for used in item.inputs:
                used.users[item] = None
            previous.after, item.before, previous = item, previous, item
        previous.after, self._end.before = self._end, previous

    def scheduled(self, bucket_bytes: int, ahead_bytes: int) -> Simulation:
        """Simulate the graph after ``bucket_collectives`` and ``overlap_collectives``; size 0 omits one."""
        if bucket_bytes:
            self.bucket(bucket_bytes)
        if ahead_bytes:
            self.overlap(ahead_bytes)
        return self.simulation()

    def __iter__(self) -> Iterator[_Item]:
        item = self._end.after
        while item is not self._end:
            found, item = item, item.after
            yield found

    def _insert(self, item: _Item, place: _Item) -> None:
        """Insert an item before another one."""
        before = place.before
        before.after, item.before, item.after, place.before = item, before, place, item
        start = before.order if before is not self._end else place.order - 1
        item.order = (start + place.order) / 2
        if not start < item.order < place.order:  # out of float precision, so renumber
            for number, one in enumerate([*self, self._end]):
                one.order = float(number)

    def _move(self, item: _Item, place: _Item) -> None:
        if item is not place:
            _unlink(item)
            self._insert(item, place)

    def _new(self, facts: _Facts, inputs: list[_Item], place: _Item) -> _Item:
        item = _Item(facts, inputs, 0.0)
        for used in inputs:
            used.users[item] = None
        self._insert(item, place)
        return item

    def bucket(self, max_bytes: int) -> None:
        """Like ``bucket_collectives{max_bytes=...}``, but collectives of written memory stay alone."""
        buckets: dict[Any, _Bucket] = {}
        needs: dict[_Item, frozenset[_Bucket]] = {}
        waits: dict[_Item, frozenset[_Bucket]] = {}
        for item in list(self):
            needed = _NONE.union(*(needs[i] for i in item.inputs if i in needs))
            for bucket in needed:
                bucket.barrier = bucket.barrier or item
            if found := needed | waits.get(item, _NONE):
                needs[item] = found
            key = item.facts.kind
            if key is None:
                continue
            bucket = buckets.get(key) or _Bucket([])
            stays = bucket.barrier is not None and bool(needed)
            full = bucket.whole + item.facts.whole > max_bytes
            if bucket.members and (stays or full or not self._can_join(bucket, item)):
                del buckets[key]
                self._merge(bucket, buckets.values())
                bucket = _Bucket([])
            buckets[key] = bucket
            bucket.members.append(item)
            waits[next(iter(item.users))] = frozenset([bucket])
        for bucket in buckets.values():
            self._merge(bucket, buckets.values())

    def _can_join(self, bucket: _Bucket, item: _Item) -> bool:
        if bucket.barrier is None:
            return True
        late = _needed_before(item.inputs, bucket.barrier)
        for needed in sorted(late or (), key=_order):
            self._move(needed, bucket.barrier)
        return late is not None

    def _merge(self, bucket: _Bucket, others: Iterable[_Bucket]) -> None:
        members = bucket.members
        if len(members) < 2 or any(member.facts.is_written for member in members):
            return
        last = members[-1].facts
        place = bucket.barrier or members[-1].after
        read = sum(member.facts.read for member in members)
        flat = self._new(self._copying(read, last.dtype), [member.inputs[0] for member in members], place)
        for other in others:
            if other.barrier in members:
                other.barrier = flat
        (message,) = last.steps
        assert isinstance(message, Send)
        key = object()
        facts = _Facts(
            steps=(self._sheet.message(key, message, bucket.whole),),
            size=sum(member.facts.size for member in members),
            is_communication=True,
            pure=last.pure,
            read=read,
            movable=True,
        )
        waits = _Facts(steps=(Wait(key),), is_communication=True, waits=True)
        done = self._new(waits, [self._new(facts, [flat], place)], place)
        for member in members:
            (wait,) = member.users
            part = done
            if last.kind[0] is GATHER or member.facts.is_returned:
                part = self._new(self._copying(member.facts.size, last.dtype), [done], place)
            for user in wait.users:
                user.inputs = [part if used is wait else used for used in user.inputs]
                part.users[user] = None
            for used in member.inputs:
                del used.users[member]
            _unlink(wait)
            _unlink(member)

    def _copying(self, size: int, dtype: torch.dtype) -> _Facts:
        seconds = self._sheet.cluster.compute_seconds(size // dtype.itemsize, 2 * size)
        return _Facts(steps=(Compute(seconds),), size=size, copies=True)

    def overlap(self, max_bytes: int) -> None:
        """Like ``overlap_collectives{max_bytes=...}``."""
        starts = [item for item in self if item.facts.is_communication and not item.facts.waits]
        waits = {item: next(iter(item.users)) for item in starts if item.facts.movable}
        self._wait_late(set(waits.values()))
        place = next((item for item in self if item.inputs), self._end)
        in_flight: list[_Item] = []

        def is_full(on_their_way: list[_Item]) -> bool:
            return sum(item.facts.whole for item in on_their_way) > max_bytes

        for item in starts:
            if item not in waits:
                place = item.after
                in_flight = [other for other in in_flight if item.order < waits[other].order]
                continue
            there, earlier = place, sorted(in_flight, key=lambda other: waits[other].order)
            while earlier and is_full([*earlier, item]) and waits[earlier[0]].order < item.order:
                there = waits[earlier.pop(0)].after
            while there.facts.copies:
                there = there.after
            needed = _needed_before(item.inputs, there) if there.order < item.order else None
            if (
                needed is not None
                and not is_full([*earlier, item])
                and all(one.facts.copies for one in needed)
            ):
                for moved in (*sorted(needed, key=_order), item):
                    self._move(moved, there)
            else:
                earlier = [other for other in in_flight if item.order < waits[other].order]
                while earlier and is_full([*earlier, item]):
                    self._move(waits[earlier.pop(0)], item)
            place, in_flight = item.after, [*earlier, item]

    def _wait_late(self, waits: set[_Item]) -> None:
        late = set(waits)
        for item in self:
            if item.inputs and item.facts.copies and late.issuperset(item.inputs):
                late.add(item)
        first_before: dict[_Item, _Item] = {}
        for item in reversed(list(self)):
            if item in late and item.users:
                user = min(item.users, key=_order)
                self._move(item, first_before.setdefault(user, user))
                first_before[user] = item

    def simulation(self) -> Simulation:
        """Like :func:`~fxpasses.distributed.simulate.simulate_graph`, with messages as the only events."""
        memory: dict[_Item, tuple[_Item, ...]] = {}
        last: dict[_Item, _Item] = {}
        item = self._end
        for item in self:
            facts = item.facts
            if facts.waits:
                memory[item] = memory[item.inputs[0]]
            elif facts.aliased:
                memory[item] = tuple(root for number in facts.aliased for root in memory[item.inputs[number]])
            else:
                memory[item] = (item,)
            for used in (item, *item.inputs):
                for root in memory[used]:
                    last[root] = item
                if used.facts.is_communication:  # reads its input until it is waited for
                    for source in used.inputs:
                        last.update(dict.fromkeys(memory[source], item))
        ends: dict[_Item, int] = {}
        for root, user in last.items():
            if user is not item and not root.facts.is_input:  # the last item returns
                ends[user] = ends.get(user, 0) + root.facts.size
        clock = Clock()
        found = clock.found
        alive = found.input_bytes = self._sheet.input_bytes
        for item in self:
            for step in item.facts.steps:
                taken = clock.take(step)
                if taken is not None and taken[3]:
                    found.events.append(Event(taken[0], "", "graph", *taken[1:]))
            alive += item.facts.size
            found.peak_bytes = max(found.peak_bytes, alive if item.facts.size else 0)
            alive -= ends.get(item, 0)
        return found


@dataclass(eq=False, slots=True)
class _Bucket:
    """Collectives to be merged, and the first call that needs one of their results."""

    members: list[_Item]
    barrier: _Item | None = None

    @property
    def whole(self) -> int:
        return sum(member.facts.whole for member in self.members)


_NONE: frozenset[_Bucket] = frozenset()


def _order(item: _Item) -> float:
    return item.order


def _unlink(item: _Item) -> None:
    item.before.after, item.after.before = item.after, item.before


def _needed_before(items: Iterable[_Item], anchor: _Item) -> set[_Item] | None:
    """Like :func:`~fxpasses.passes._matching.needed_before`, for items."""
    late: set[_Item] = set()
    stack = [item for item in items if item.order >= anchor.order]
    while stack:
        item = stack.pop()
        if item in late:
            continue
        if item is anchor or not item.facts.pure:
            return None
        late.add(item)
        stack.extend(used for used in item.inputs if used.order >= anchor.order)
        if item.facts.random:
            earlier = item.before
            while earlier is not anchor and not earlier.facts.random:
                earlier = earlier.before
            if earlier is not anchor or anchor.facts.random:
                stack.append(earlier)
    return late
