"""Compute the loss of a large vocabulary on a few rows of logits at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graphs.rewriting import replace
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    calls_before,
    find_calls,
    is_call,
    is_pure,
    move_before,
    needed_before,
    shape_of,
    untransposed,
)
from fxpasses.passes._options import require_at_least
from fxpasses.passes._rowwise import Selection, select_inputs
from fxpasses.passes._saved import depending_on_gradients

aten = torch.ops.aten

_MATMULS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class ChunkLogits(Pass):
    """Compute a loss over many classes, and its gradients, one chunk of rows at a time.

    The logits of a language model are ``tokens x vocabulary``, often the largest tensor of a training step,
    and their gradient is as large. The forward pass reduces the logits of a chunk to numbers per row and
    drops them. The backward pass recomputes them, chunk by chunk, and accumulates the weight gradient.

    Before::

        logits = aten.mm(hidden, weight)                     # f32[4096, 50257]
        loss = ...                                           # row-wise: maximum, sum of exponentials, gather
        ...
        grad_weight = aten.mm(aten.permute(grad_logits, [1, 0]), hidden)
        grad_hidden = aten.mm(grad_logits, aten.permute(weight, [1, 0]))

    After::

        logits_0 = aten.mm(aten.slice(hidden, 0, 0, 512), weight)
        ...                                                  # seven more
        grad_weight = aten.add(aten.mm(aten.permute(grad_logits_0, [1, 0]), hidden_0), ...)
        grad_hidden = aten.cat([aten.mm(grad_logits_0, aten.permute(weight, [1, 0])), ...])

    Costs one extra matmul for the logits. Applies to losses that treat rows independently and do not return
    logits. Equal up to rounding: sums over rows have another order.

    Attributes:
        chunks: the number of chunks.
        min_elements: minimum number of logits.
    """

    name: ClassVar[str] = "chunk_logits"
    contract: ClassVar[Contract] = Contract("joint", numerics="tolerance")
    chunks: int = 8
    min_elements: int = 1 << 22

    def __post_init__(self) -> None:
        require_at_least(self, chunks=2, min_elements=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for logits in find_calls(gm.graph, *_MATMULS):
            shape = shape_of(logits)
            if shape is None or math.prod(shape) < self.min_elements or shape[0] < self.chunks:
                continue
            if not _is_normalized(logits):
                continue
            subgraph = _Subgraph(logits)
            if subgraph.find_nodes() and subgraph.is_loss() and claim(logits):
                changed |= subgraph.split(self.chunks)
        return changed


def _is_normalized(logits: fx.Node) -> bool:
    """Whether the maximum of each row is taken, as in a softmax, possibly in another dtype."""
    casts = [user for user in logits.users if is_call(user, torch.ops.prims.convert_element_type.default)]
    return any(is_call(user, aten.amax.default) for value in (logits, *casts) for user in value.users)


@dataclass(frozen=True)
class _Chunk(Selection):
    """The rows of one chunk, with copies of the subgraph's values for them."""

    copies: dict[fx.Node, fx.Node] = field(default_factory=dict, compare=False)

    def of(self, node: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        part = super().of(node, call)
        self.copies[node] = part
        return part


@dataclass(frozen=True)
class _Half:
    """The part of a subgraph that the forward or the backward pass computes.

    Attributes:
        nodes: its nodes, in graph order.
        anchor: the node before which chunks are computed.
        is_forward: whether it is the forward pass.
    """

    nodes: list[fx.Node]
    anchor: fx.Node
    is_forward: bool


class _Subgraph:
    """All values of the size of the logits, and everything that depends on them row by row.

    Attributes:
        nodes: the values, each ``[rows, ...]``.
        exits: reductions over rows (sums, and matmuls for a weight gradient), and the gradient of the rows.
    """

    def __init__(self, logits: fx.Node) -> None:
        self.rows, columns = shape_of(logits) or (0, 0)
        self.big_numel = self.rows * columns // 2
        self.logits = logits
        self.nodes: set[fx.Node] = {logits}
        self.exits: list[fx.Node] = []
        self.graph = logits.graph

    def find_nodes(self) -> bool:
        """Find the nodes. Returns False if something does not treat rows independently."""
        pending = [self.logits]
        while pending:
            node = pending.pop()
            near = (
                [n for n in node.all_input_nodes if self._has_logits_size(n)]
                if node is not self.logits
                else []
            )
            for other in (*near, *(node.users if self._has_logits_size(node) else ())):
                if other in self.nodes or other in self.exits:
                    continue
                if other in node.users and self._is_exit(other):
                    self.exits.append(other)
                elif self._is_rowwise(other):
                    self.nodes.add(other)
                    pending.append(other)
                else:
                    return False
            if not pending:
                between = self._nodes_between()
                if between is None:
                    return False
                self.nodes |= between
                pending.extend(between)
        return True

    def is_loss(self) -> bool:
        """Whether gradients are computed here, and no logits are returned."""
        return bool(self.exits) and not any(user.op == "output" for n in self.nodes for user in n.users)

    def _has_logits_size(self, node: fx.Node) -> bool:
        shape = shape_of(node)
        return shape is not None and shape[:1] == (self.rows,) and math.prod(shape) >= self.big_numel

    def _is_rowwise(self, node: fx.Node) -> bool:
        shape = shape_of(node)
        return (
            shape is not None and shape[:1] == (self.rows,) and is_pure(node) and node.op == "call_function"
        )

    def _is_exit(self, node: fx.Node) -> bool:
        if is_call(node, *_MATMULS):
            return node.target is aten.mm.default and self._has_logits_size(node.args[0])  # type: ignore[arg-type]
        if is_call(node, aten.sum.dim_IntList):
            dims: Any = node.args[1]
            return [d % 2 for d in dims] == [0]
        return untransposed(node) is not None and all(
            is_call(user, aten.mm.default) and user.args[0] is node and user.args[1] is not node
            for user in node.users
        )

    def _nodes_between(self) -> set[fx.Node] | None:
        """Return row-wise values on paths from the subgraph back into it; None if one is not row-wise."""
        downstream: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node not in self.nodes and any(
                n in self.nodes or n in downstream for n in node.all_input_nodes
            ):
                downstream.add(node)
        needed = {i for n in (*self.nodes, *self.exits) for i in n.all_input_nodes} & downstream - set(
            self.exits
        )
        return needed if all(self._is_rowwise(node) for node in needed) else None

    def split(self, chunks: int) -> bool:
        """Compute the subgraph in chunks. If an operator has no rule, change nothing and return False."""
        halves = self._halves()
        if halves is None:
            return False
        bounds = [self.rows * i // chunks for i in range(chunks + 1)]
        parts = [_Chunk(0, a, b, {}) for a, b in itertools.pairwise(bounds)]
        made: list[fx.Node] = []
        early, late = halves
        reductions = self._reductions()
        totals: dict[fx.Node, list[fx.Node]] = {node: [] for node in reductions}
        copied = all(self._copy(early, part, made) for part in parts)
        in_early = len(made)
        for part in parts if copied else ():
            copied = copied and self._copy(late, part, made)
            # Compute a chunk's contributions at once, so that its gradient is dropped before the next chunk.
            for node in reductions if copied else ():
                self._add_contribution(
                    node, part, totals[node], _recording(calls_before(late.anchor, like=node), made)
                )
        if not copied:
            for call_made in reversed(made):
                self.graph.erase_node(call_made)
            return False
        move_before(self._reduction_inputs(late.nodes), next(iter(made[in_early:]), late.anchor))
        for node, rows in totals.items():
            whole = calls_before(late.anchor, like=node)
            replace(node, whole(aten.cat.default, rows, 0) if len(rows) > 1 else rows[0])
        for half in halves:
            self._replace_outside_uses(half, parts)
        self._erase()
        return True

    def _halves(self) -> tuple[_Half, _Half] | None:
        """Return the forward and backward parts; None if they cannot be separated."""
        late = self._backward_nodes()
        ordered = [node for node in self.graph.nodes if node in self.nodes]
        early_nodes = [node for node in ordered if node not in late]
        late_nodes = [node for node in ordered if node in late]
        if not early_nodes or not late_nodes or any(e < late_nodes[-1] for e in self.exits):
            return None
        before_early, before_late = early_nodes[-1].next, late_nodes[-1].next
        others = self._reduction_inputs(late_nodes)
        while before_late in others:
            before_late = before_late.next
        if needed_before(others, before_late) is None:
            return None
        if any(user < before_early for n in early_nodes for user in n.users if user not in self.nodes):
            return None
        return _Half(early_nodes, before_early, True), _Half(late_nodes, before_late, False)

    def _reduction_inputs(self, late: list[fx.Node]) -> set[fx.Node]:
        """Return the other inputs of the reductions over rows."""
        return {n for e in self._reductions() for n in e.all_input_nodes} - {
            late[-1],
            *self.exits,
            *self.nodes,
        }

    def _reductions(self) -> list[fx.Node]:
        """Return the reductions over rows and the rows' gradient: the exits, or a transpose's matmuls."""
        return [p for e in self.exits for p in (e.users if untransposed(e) is not None else [e])]

    def _copy(self, half: _Half, part: _Chunk, made: list[fx.Node]) -> bool:
        """Copy the nodes of ``half`` for the rows of one chunk. Returns False if an operator has no rule."""
        for node in half.nodes:
            copy = select_inputs(node, part, _recording(calls_before(half.anchor, like=node), made))
            if copy is None:
                return False
            part.copies[node] = copy
            if half.is_forward and self._has_logits_size(node):
                # As in activation checkpointing: dropped after the forward pass, and recomputed.
                copy.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=1 << 30)
        return True

    def _replace_outside_uses(self, half: _Half, parts: list[_Chunk]) -> None:
        """Give users outside the subgraph the concatenated chunks of its values."""
        for node in half.nodes:
            outside = [user for user in node.users if user not in self.nodes and user not in self.exits]
            if outside:
                call = calls_before(half.anchor, like=node)
                whole = call(aten.cat.default, [part.copies[node] for part in parts], 0)
                for user in outside:
                    user.replace_input_with(node, whole)

    def _erase(self) -> None:
        ordered = [node for node in self.graph.nodes if node in self.nodes]
        transposes = [e for e in self.exits if untransposed(e) is not None]
        for node in reversed([*ordered, *transposes]):
            if not node.users:
                self.graph.erase_node(node)

    def _backward_nodes(self) -> set[fx.Node]:
        """Return the nodes that only the backward pass needs."""
        late: set[fx.Node] = set()
        depends = depending_on_gradients(self.graph)
        for node in reversed(self.graph.nodes):
            users = [u for u in node.users if u not in self.exits]
            if node in self.nodes and (node in depends or (users and late.issuperset(users)) or not users):
                late.add(node)
        return late

    def _add_contribution(
        self, reduction: fx.Node, part: _Chunk, made: list[fx.Node], call: Callable[..., fx.Node]
    ) -> None:
        """Add one chunk's contribution to a reduction over rows, or to the gradient of the rows.

        Args:
            reduction: the reduction, or the gradient.
            part: the chunk.
            made: the sum so far, or the rows so far.
            call: makes a call.
        """
        source: Any = reduction.args[0]
        if reduction.target is aten.sum.dim_IntList:
            term = call(reduction.target, part.copies[source], *reduction.args[1:], **reduction.kwargs)
        elif untransposed(source) is not None:
            flipped = call(aten.permute.default, part.copies[untransposed(source)], [1, 0])  # type: ignore[index]
            term = call(reduction.target, flipped, part.of(reduction.args[1], call))  # type: ignore[arg-type]
        else:
            made.append(call(reduction.target, part.copies[source], reduction.args[1]))
            return
        made[:] = [call(aten.add.Tensor, made[0], term) if made else term]


def _recording(call: Callable[..., fx.Node], made: list[fx.Node]) -> Callable[..., fx.Node]:
    def record(*args: Any, **kwargs: Any) -> fx.Node:
        made.append(call(*args, **kwargs))
        return made[-1]

    return record
