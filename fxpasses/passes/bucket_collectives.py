"""Many small reductions between processes become a few large ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo, is_mutating
from fxpasses.graphs.rewriting import replace, value_of
from fxpasses.pass_manager.contract import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import bring_before, calls_before, is_call, shape_of
from fxpasses.passes._options import require_at_least

__all__ = ["BucketCollectives"]

aten = torch.ops.aten

_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Reduce several tensors over the processes with one message.

    Each ``all_reduce`` costs a round trip whatever its size; the gradients of biases and norms are small and many.
    Reductions of the same kind, type and group are copied into one buffer and reduced together.

    Before::

        a = _c10d_functional.all_reduce(grad_a, 'sum', '0')
        a_done = _c10d_functional.wait_tensor(a)
        b = _c10d_functional.all_reduce(grad_b, 'sum', '0')
        b_done = _c10d_functional.wait_tensor(b)

    After::

        flat = aten.cat([grad_a.view(-1), grad_b.view(-1)])
        done = _c10d_functional.wait_tensor(_c10d_functional.all_reduce(flat, 'sum', '0'))
        a_done = aten.slice(done, 0, 0, 1000).view(10, 100)
        b_done = aten.slice(done, 0, 1000, 1010)

    A bucket ends where the next reduction depends on one of its results, and at ``max_bytes``. Every process
    must compile the same graph, as for any collective. A sum over processes may add in another order: equal up to rounding.

    Attributes:
        max_bytes: size of the largest bucket, in bytes; larger tensors are reduced alone.
    """

    name: ClassVar[str] = "bucket_collectives"
    contract: ClassVar[Contract] = Contract(("joint", "backward", "inference"), numerics="tolerance")
    max_bytes: int = 25 << 20

    def __post_init__(self) -> None:
        require_at_least(self, max_bytes=1)

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        changed = False
        bucket = _Bucket()
        for node in list(gm.graph.nodes):
            if bucket.barrier is None and any(n in bucket.waits for n in node.all_input_nodes):
                bucket.barrier = node
            if not is_call(node, _REDUCE) or not _may_move(node, aliases):
                continue
            if not self._fits(bucket, node) or not bucket.reach(node):
                changed |= bucket.merge(aliases)
                bucket = _Bucket()
            bucket.members.append(node)
        return bucket.merge(aliases) or changed

    def _fits(self, bucket: _Bucket, node: fx.Node) -> bool:
        if not bucket.members:
            return True
        first = bucket.members[0]
        alike = list(first.args[1:]) == list(node.args[1:]) and _kind(first) == _kind(node)
        return alike and sum(value_of(n).nbytes for n in (*bucket.members, node)) <= self.max_bytes


def _kind(node: fx.Node) -> tuple[torch.dtype, torch.device]:
    return value_of(node).dtype, value_of(node).device


def _may_move(node: fx.Node, aliases: AliasInfo) -> bool:
    """Whether a reduction's result is only waited for, once, and its input can be copied as a row."""
    source, waits = node.args[0], list(node.users)
    if shape_of(source) is None or not value_of(source).is_contiguous():  # type: ignore[arg-type]
        return False
    return len(waits) == 1 and is_call(waits[0], _WAIT)


@dataclass
class _Bucket:
    """Reductions that will be one.

    Attributes:
        members: the reductions, in order.
        barrier: the first call that needs one of their results, or None so far.
    """

    members: list[fx.Node] = field(default_factory=list)
    barrier: fx.Node | None = None

    @property
    def waits(self) -> set[fx.Node]:
        return {user for node in self.members for user in node.users}

    def reach(self, node: fx.Node) -> bool:
        """Whether ``node``'s input can be there when the bucket is reduced; moves it there."""
        return self.barrier is None or bring_before([node.args[0]], self.barrier)  # type: ignore[list-item]

    def _is_written_before(self, point: fx.Node, aliases: AliasInfo) -> bool:
        """Whether memory that is reduced is written to before all of it is read (a reduction in place writes later)."""
        roots = frozenset().union(*(aliases.roots(node.args[0]) for node in self.members))  # type: ignore[arg-type]
        latest = max(point, *self.members)
        if not roots & aliases.mutated:
            return False
        writes = [n for n in point.graph.nodes if is_mutating(n) and n is not point]
        return any(aliases.written_by(write) & roots and write < latest for write in writes)

    def merge(self, aliases: AliasInfo) -> bool:
        """Reduce all members with one message, before the barrier; whether the graph changed."""
        if len(self.members) < 2 or not claim(self.members[0]):
            return False
        last = self.members[-1]
        point = self.barrier or last.next
        if self._is_written_before(point, aliases):
            return False
        call = calls_before(point, like=last)
        parts = [call(aten.view.default, node.args[0], [-1]) for node in self.members]
        done = call(_WAIT, call(_REDUCE, call(aten.cat.default, parts, 0), *last.args[1:]))
        start = 0
        for node in self.members:
            (wait,) = node.users
            end = start + value_of(node).numel()
            part = call(aten.slice.Tensor, done, 0, start, end)
            part = call(aten.view.default, part, list(value_of(node).shape))
            if aliases.roots(wait) & aliases.output:  # what is returned has memory of its own
                part = call(aten.clone.default, part)
            replace(wait, part)
            node.graph.erase_node(node)
            start = end
        return True
