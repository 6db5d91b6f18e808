"""Merge many small messages between processes into a few large ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fake.seam.dispatch import collectives
from fxpasses.graphs.aliasing import AliasInfo, is_mutating
from fxpasses.graphs.rewriting import replace, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, is_call, move_before, shape_of
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten

REDUCE = collectives.all_reduce.default
GATHER = collectives.all_gather_into_tensor.default
SCATTER = collectives.reduce_scatter_tensor.default
_WAIT = collectives.wait_tensor.default


@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Reduce, gather, or reduce-scatter several tensors with one message.

    Each message costs a round trip regardless of its size. Gradients of biases and norms are small and many,
    and so are parameter shards that are gathered where they are used. Collectives of the same kind, dtype and
    group are copied into one buffer and sent together.

    Before::

        a = _c10d_functional.all_reduce(grad_a, 'sum', '0')
        a_done = _c10d_functional.wait_tensor(a)
        b = _c10d_functional.all_reduce(grad_b, 'sum', '0')
        b_done = _c10d_functional.wait_tensor(b)

    After::

        flat = aten.cat([grad_a.view(-1), grad_b.view(-1)])
        done = _c10d_functional.wait_tensor(_c10d_functional.all_reduce(flat, 'sum', '0'))
        split = aten.split_with_sizes(done, [1000, 10])
        a_done, b_done = split[0].view(10, 100), split[1]

    Gathered data arrives as one row per process, from which each tensor's columns are copied out; data to
    scatter is packed in such rows. No rank is written into the graph, so one cache entry serves all ranks. A
    bucket ends if the next collective depends on one of its results, and at ``max_bytes``, which also limits
    what may be gathered before it is needed. Every process must compile the same graph, as for any
    collective. A sum over processes may be added in another order: equal up to rounding.

    Attributes:
        max_bytes: maximum size of a bucket, in bytes of whole (gathered) tensors. Larger tensors are sent
            alone.
    """

    name: ClassVar[str] = "bucket_collectives"
    contract: ClassVar[Contract] = Contract(("forward", "backward", "inference"), numerics="tolerance")
    max_bytes: int = 25 << 20

    def __post_init__(self) -> None:
        require_at_least(self, max_bytes=1)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        buckets: dict[Any, _Bucket] = {}
        waits: dict[fx.Node, frozenset[_Bucket]] = {}
        needs: dict[fx.Node, frozenset[_Bucket]] = {}
        for node in list(gm.graph.nodes):
            needed: frozenset[_Bucket] = frozenset().union(
                *(needs.get(n, frozenset()) for n in node.all_input_nodes)
            )
            for bucket in needed:
                bucket.barrier = bucket.barrier or node
            needs[node] = needed | waits.get(node, frozenset())
            if not is_call(node, REDUCE, GATHER, SCATTER) or not fits_a_bucket(node):
                continue
            key = kind_of(node)
            open_one = buckets.get(key)
            # A call that needs pending results cannot move to where other results are needed.
            stays = open_one is not None and open_one.barrier is not None and bool(needed)
            if open_one is not None and (
                stays or not self._fits(open_one, node) or not open_one.make_available(node)
            ):
                del buckets[key]
                changed |= open_one.merge(buckets.values())
            bucket = buckets.setdefault(key, _Bucket())
            bucket.members.append(node)
            (wait,) = node.users
            waits[wait] = frozenset([bucket])
        for bucket in buckets.values():
            changed |= bucket.merge(buckets.values())
        return changed

    def _fits(self, bucket: _Bucket, node: fx.Node) -> bool:
        return sum(_message_bytes(member) for member in (*bucket.members, node)) <= self.max_bytes


def kind_of(node: fx.Node) -> Any:
    """Return what must be equal to send collectives together: operator, reduction, group, dtype, device."""
    source = value_of(node.args[0])  # type: ignore[arg-type]
    return node.target, tuple(node.args[1:]), source.dtype, source.device


def _message_bytes(node: fx.Node) -> int:
    return max(value_of(node).nbytes, value_of(node.args[0]).nbytes)  # type: ignore[arg-type]


def fits_a_bucket(node: fx.Node) -> bool:
    """Whether a collective's result is used only by one wait, and its input can be copied as a row."""
    source, waits = node.args[0], list(node.users)
    if shape_of(source) is None or shape_of(node) is None or not value_of(source).is_contiguous():  # type: ignore[arg-type]
        return False
    return len(waits) == 1 and is_call(waits[0], _WAIT)


@dataclass(eq=False)
class _Bucket:
    """Collectives to be merged.

    Attributes:
        members: the collectives, in order.
        barrier: the first call that needs one of their results, or None so far.
    """

    members: list[fx.Node] = field(default_factory=list)
    barrier: fx.Node | None = None

    def make_available(self, node: fx.Node) -> bool:
        """Whether ``node``'s input can be available where the bucket is sent. Moves it there."""
        return self.barrier is None or move_before([node.args[0]], self.barrier)  # type: ignore[list-item]

    def _is_written_before(self, point: fx.Node, aliases: AliasInfo) -> bool:
        """Whether reduced memory is written before all of it is read (in-place reductions write later)."""
        roots = frozenset().union(*(aliases.roots(node.args[0]) for node in self.members))  # type: ignore[arg-type]
        latest = max(point, *self.members)
        if not roots & aliases.mutated:
            return False
        writes = [n for n in point.graph.nodes if is_mutating(n) and n is not point]
        return any(aliases.written_by(write) & roots and write < latest for write in writes)

    def merge(self, others: Iterable[_Bucket]) -> bool:
        """Send all members as one message, before the barrier. Returns whether the graph changed.

        Members are erased. They may be barriers of ``others``, which are updated.
        """
        if len(self.members) < 2 or not claim(self.members[0]):
            return False
        last = self.members[-1]
        point = self.barrier or last.next
        aliases = AliasInfo(last.graph)  # after the changes of other buckets
        if self._is_written_before(point, aliases):
            return False
        call = calls_before(point, like=last)
        rows = [_group_size(last)] if last.target is SCATTER else []
        parts = [call(aten.view.default, node.args[0], [*rows, -1]) for node in self.members]
        for other in others:
            if other.barrier in self.members:
                other.barrier = parts[0]
        flat = call(aten.cat.default, parts, len(rows))
        if rows:
            flat = call(aten.view.default, flat, [-1])
        done = call(_WAIT, call(last.target, flat, *last.args[1:]))
        rows = [_group_size(last)] if last.target is GATHER else []
        if rows:
            done = call(aten.view.default, done, [*rows, -1])
        sizes = [value_of(node).numel() // math.prod(rows) for node in self.members]
        split = call(aten.split_with_sizes.default, done, sizes, len(rows))
        for number, node in enumerate(self.members):
            (wait,) = node.users
            part = call(operator.getitem, split, number)
            if rows:  # columns
                part = call(aten.clone.default, part, memory_format=torch.contiguous_format)
            if rows or value_of(node).ndim != 1:
                part = call(aten.view.default, part, list(value_of(node).shape))
            if not rows and aliases.roots(wait) & aliases.output:  # outputs must own their memory
                part = call(aten.clone.default, part)
            replace(wait, part)
            node.graph.erase_node(node)
        return True


def _group_size(node: fx.Node) -> int:
    """Return the number of processes given to a gathering or scattering collective."""
    return node.args[1 if node.target is GATHER else 2]  # type: ignore[return-value]
