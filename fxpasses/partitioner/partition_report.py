"""The report of a partition, for people and for other passes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx

from fake.notebook import as_html
from fxpasses.partitioner import _torch
from fxpasses.partitioner.classify import JointGraph
from fxpasses.partitioner.cost import CostModel, is_getitem
from fxpasses.partitioner.recomputation import Terms, Verdict

META_KEY = "fxpasses.partition"
"""The key of the report in the forward graph module's ``meta``."""


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that the forward graph saves for the backward graph.

    Attributes:
        name: its node's name, the same in the joint, forward and backward graphs.
        bytes: its size, 0 for a symbol or an opaque object.
        source: the operator that computes it, or ``input``.
        kind: ``activation``, ``input``, ``static input`` (lives as long as the model), ``symbol`` or
            ``opaque``.
        reason: why it was not recomputed instead; ``smaller than what it is computed from`` if it was a
            choice.
        stack_trace: the user's source lines, if known.
    """

    name: str
    bytes: int
    source: str
    kind: str
    reason: str
    stack_trace: str | None = None


@dataclasses.dataclass(frozen=True)
class RecomputedValue:
    """An operation that runs in both passes. `flops` is the estimate of `fxpasses.partitioner.cost`."""

    name: str
    flops: int
    source: str
    reason: str


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """The decision of one call of `fxpasses.partitioner.partition`.

    Attributes:
        memory_budget: the effective budget, between 0 and 1.
        saved: every saved value, in joint graph order.
        recomputed: every recomputed operation, in joint graph order.
        saved_bytes: bytes of the saved values, without inputs that outlive the backward pass.
        bytes_at_full_budget: `saved_bytes` at a budget of 1.
        bytes_at_zero_budget: `saved_bytes` at a budget of 0. Computed only for a budget below 1, else None.
        recomputed_flops: FLOPs of the recomputed operations.
        seconds: time that the partition took, by part (``total`` for all of it).
        curve: saved bytes and the FLOPs of expensive operations recomputed for them, from a budget of 1 down
            to 0. Empty unless requested.
    """

    memory_budget: float
    saved: tuple[SavedValue, ...]
    recomputed: tuple[RecomputedValue, ...]
    saved_bytes: int
    bytes_at_full_budget: int
    bytes_at_zero_budget: int | None
    recomputed_flops: int
    seconds: Mapping[str, float]
    curve: tuple[tuple[int, int], ...] = ()

    @property
    def static_bytes(self) -> int:
        """Bytes of the saved inputs that outlive the backward pass, such as parameters."""
        return sum(value.bytes for value in self.saved if value.kind == "static input")

    def __copy__(self) -> "PartitionReport":
        return self

    def __deepcopy__(self, memo: object) -> "PartitionReport":
        return self  # nothing in it changes

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop all contents when the report is pickled.

        Inductor pickles a graph module, including its ``meta``, to compute a cache key. Seconds, size hints
        and source lines in the key would prevent cache hits for equal graphs.
        """
        return (_empty_report, ())

    def _repr_html_(self) -> str:
        rows = [
            *((v.name, "saved", f"{v.bytes:,} bytes", v.source, f"{v.kind}; {v.reason}") for v in self.saved),
            *((v.name, "computed again", f"{v.flops:,} FLOPs", v.source, v.reason) for v in self.recomputed),
        ]
        return as_html(self._head(), ("value", "", "costs", "operator and line", "why"), rows)

    def _head(self) -> str:
        return (
            f"memory budget {self.memory_budget:g}: {self.saved_bytes:,} bytes saved in {len(self.saved)} values, "
            f"{self.recomputed_flops:,} FLOPs recomputed in {len(self.recomputed)} operations, "
            f"{self.seconds.get('total', 0.0):.3f} s"
        )

    def __str__(self) -> str:
        lines = [self._head()]
        lines += [
            f"  saved {v.name}: {v.bytes:,} bytes, {v.source} ({v.kind}; {v.reason})" for v in self.saved
        ]
        lines += [f"  recomputed {v.name}: {v.flops:,} FLOPs, {v.source}" for v in self.recomputed]
        return "\n".join(lines)


def _empty_report() -> PartitionReport:
    return PartitionReport(1.0, (), (), 0, 0, None, 0, {})


def make_report(
    graph: JointGraph,
    cost: CostModel,
    terms: Sequence[Verdict],
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    memory_budget: float,
    bytes_at_full_budget: int,
    bytes_at_zero_budget: int | None,
    seconds: Mapping[str, float],
) -> PartitionReport:
    """Derive from the two modules which values are saved and which calls run twice.

    Args:
        graph: the joint graph.
        cost: bytes and FLOPs of its nodes.
        terms: for each node, on which terms it could be recomputed.
        forward: the forward module. Its outputs from ``num_fwd_outputs`` on are the saved values.
        backward: the backward module.
        num_fwd_outputs: how many outputs the forward pass returns to its caller.
        memory_budget: the effective budget, from 0 to 1.
        bytes_at_full_budget: bytes that a budget of 1 saves.
        bytes_at_zero_budget: bytes that a budget of 0 saves, or ``None`` if that was not computed.
        seconds: time that each part of the partition took.
    """
    number = {node.name: i for i, node in enumerate(graph.nodes)}
    (output,) = forward.graph.find_nodes(op="output")
    saved = []
    for node in output.args[0][num_fwd_outputs:]:
        saved.append(_saved_value(node, number.get(node.name), graph, cost, terms))
    computed = {n.name for n in forward.graph.nodes if n.op == "call_function"}
    recomputed = []
    for node in backward.graph.nodes:
        i = number.get(node.name)
        if node.op == "call_function" and i is not None and node.name in computed:
            recomputed.append(
                RecomputedValue(node.name, cost.flops_of(node), _operator_name(node), terms[i].reason)
            )
    return PartitionReport(
        memory_budget,
        tuple(saved),
        tuple(recomputed),
        sum(value.bytes for value in saved if value.kind != "static input"),
        bytes_at_full_budget,
        bytes_at_zero_budget,
        sum(value.flops for value in recomputed),
        seconds,
    )


def _saved_value(
    node: fx.Node, i: int | None, graph: JointGraph, cost: CostModel, terms: Sequence[Verdict]
) -> SavedValue:
    size = cost.bytes_of(node)
    if _torch.is_sym_node(node):
        kind = "symbol"
    elif _torch.is_opaque(node):
        kind = "opaque"
    elif i in graph.static_inputs:
        kind = "static input"
    else:
        kind = "input" if node.op == "placeholder" else "activation"
    if i is None:
        reason = "made by the partitioner: a random-number state, or an input before it is overwritten"
    else:
        while is_getitem(graph.nodes[i]) and graph.inputs[i]:
            i = graph.inputs[i][0]  # the operation that returned the tuple
        chosen = terms[i].terms not in (Terms.NEVER, Terms.PRICED)
        reason = "smaller than what it is computed from" if chosen else terms[i].reason
    source = "input" if node.op == "placeholder" else _operator_name(node)
    return SavedValue(node.name, size, source, kind, reason, node.meta.get("stack_trace"))


def _operator_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target) if callable(node.target) else node.target)
