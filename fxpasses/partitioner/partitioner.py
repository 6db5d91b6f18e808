"""The partition function that AOTAutograd calls: joint graph in, forward and backward graphs out."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from fake.wrong_arguments import ArgumentTypeError, check_flags, check_type
from fxpasses.partitioner import _torch
from fxpasses.partitioner.budget import chain_of_cuts, cut_without_price
from fxpasses.partitioner.classify import JointGraph, read_joint_graph
from fxpasses.partitioner.cost import CostModel
from fxpasses.partitioner.errors import PartitionOptionError
from fxpasses.partitioner.extract import extract
from fxpasses.partitioner.flow_graph import BACKWARD, build_network, save_weights
from fxpasses.partitioner.partition_report import META_KEY, make_report
from fxpasses.partitioner.recomputation import RecomputePolicy, Verdict, recompute_verdicts

log = logging.getLogger(__name__)

_CURVE_POINTS = 100
"""How many points of a curve are kept, besides the last one."""


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    memory_budget: float | None = 1.0,
    curve: bool = False,
    decides: Callable[[fx.GraphModule, list[str]], list[str]] | None = None,
    **aot_kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split AOTAutograd's joint graph into forward and backward graphs that together save the fewest bytes.

    Pass it (or a `functools.partial` of it) to AOTAutograd as ``partition_fn``. A value that the backward
    graph needs is either saved, as an extra output of the forward graph, or recomputed. At a budget of 1,
    only cheap work is recomputed. At 0, everything that may run twice is. Between them, at most
    ``zero + budget * (full - zero)`` bytes are saved, at the fewest FLOPs that a fixed chain of cuts offers.
    With a growing budget, saved bytes never fall and recomputed FLOPs never grow.

    Args:
        joint: the joint graph. Its nodes are tagged; nothing else is changed.
        joint_inputs: its example inputs; not used.
        num_fwd_outputs: how many of its outputs the forward pass returns to its caller.
        static_lifetime_input_indices: positions among the inputs of parameters and others that outlive the
            backward pass: saving them costs nothing.
        memory_budget: 0 to 1. ``torch.autograd.graph.region_activation_memory_budget`` around the forward
            pass overrides it. None reads ``torch._functorch.config.activation_memory_budget``.
        curve: whether the report includes the results of other budgets.
        decides: overrides what is saved: maps the joint graph and the names of the nodes that the cut saves
            to the names of another valid cut of it (such as another rank's). Validity is not checked.
        **aot_kwargs: further arguments of AOTAutograd and Inductor (``compiler``); not used.

    Returns:
        The forward module (inputs: primals; outputs: the caller's, then saved tensors, opaque objects and
        symbols) and the backward module (inputs: saved symbols, tensors, opaque objects, then tangents). The
        forward module's ``meta["fxpasses.partition"]`` is a `PartitionReport`.

    Raises:
        PartitionOptionError: if the budget is not between 0 and 1, or regions have different budgets.
        PartitionError: if a value can be neither saved nor recomputed.
        ArgumentTypeError: if ``joint`` is not a graph, ``num_fwd_outputs`` is not a number of outputs, or
            another argument has a wrong type.
    """
    check_budget("memory_budget", memory_budget)
    check_flags("partition", curve=curve)
    static = static_lifetime_input_indices or ()
    for name, value, kinds, expected in (
        ("joint", joint, fx.GraphModule, "the joint graph, a torch.fx.GraphModule"),
        ("num_fwd_outputs", num_fwd_outputs, _is_count, "how many outputs are the forward pass's"),
        ("static_lifetime_input_indices", static, _are_counts, "positions among the inputs"),
        ("decides", decides or _nodes_by_name, callable, "a function of the joint graph and names of nodes"),
    ):
        check_type("partition", name, value, kinds, expected)
    if aot_kwargs:
        log.debug("not used: %s", sorted(aot_kwargs))
    clock = _Clock()
    joint = prepare(joint)
    clock.lap("prepare")
    graph = read_joint_graph(joint, num_fwd_outputs, static_lifetime_input_indices)
    if not graph.has_backward:
        return _torch.default_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
    budget = _effective_budget(joint, graph, memory_budget)
    cost = CostModel()
    policy = RecomputePolicy.from_torch_config()
    terms = recompute_verdicts(graph, cost, policy)
    clock.lap("classify")
    side, full, zero = _compute_sides(graph, cost, terms, policy, budget)
    clock.lap("cut")
    saved = [graph.nodes[i] for i in range(len(graph.nodes)) if _is_saved(i, side)]
    if _torch.functorch_config._sync_decision_cross_ranks:
        saved = _torch.sync_decision_cross_ranks(joint.graph, saved)
    if decides is not None:
        saved = _nodes_by_name(graph.nodes, decides(joint, [node.name for node in saved]))
    forward, backward = extract(joint, graph, [graph.index[node] for node in saved])
    clock.lap("extract")
    report = make_report(
        graph, cost, terms, forward, backward, num_fwd_outputs, budget, full, zero, clock.laps()
    )
    if curve:
        report = dataclasses.replace(report, curve=_curve(graph, cost, terms, policy))
    forward.meta[META_KEY] = report
    log.info("%s", report)
    return forward, backward


def _nodes_by_name(nodes: Sequence[fx.Node], names: Any) -> list[fx.Node]:
    by_name = {node.name: node for node in nodes}
    known = isinstance(names, Sequence) and all(name in by_name for name in names)
    if not known:
        raise ArgumentTypeError(
            "partition", "decides", names, "a function that returns names of nodes of the joint graph"
        )
    return [by_name[name] for name in names]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(_is_count(item) for item in value)


def check_budget(option: str, budget: float | None) -> None:
    """Raise `PartitionOptionError` unless `budget` is None or a number between 0 and 1."""
    if budget is not None and not (
        isinstance(budget, int | float) and not isinstance(budget, bool) and 0 <= budget <= 1
    ):
        raise PartitionOptionError(option, budget, "a number between 0 and 1")


def prepare(joint: fx.GraphModule) -> fx.GraphModule:
    """Tag the nodes with AOTAutograd's own constraints."""
    if _torch.has_recomputable_ops(joint):
        joint = _torch.cleanup_recompute_tags(joint, is_default_partition=False)
    if not _torch.functorch_config.unsafe_allow_optimization_of_collectives:
        _torch.force_save_collectives(joint)
    _torch.force_save_effectful_ops(joint)
    _torch.force_save_bw_mutation_src(joint)
    return joint


def _effective_budget(joint: fx.GraphModule, graph: JointGraph, memory_budget: float | None) -> float:
    """The budget of the user's region if there is one, else the given budget, else torch's setting."""
    budgets: set[float] = set()
    outside: list[str] = []
    for module in joint.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            budget = _torch.region_memory_budget(node)
            if budget is not None:
                budgets.add(budget)
            elif node.op == "call_function" and (module is not joint or graph.in_forward[graph.index[node]]):
                outside.append(node.name)
    if len(budgets) > 1:
        raise PartitionOptionError(
            "memory budget of a region",
            sorted(budgets),
            "one budget for a whole graph: use a graph break between regions with different budgets",
        )
    if budgets:
        if outside:
            raise PartitionOptionError(
                "memory budget of a region",
                budgets.pop(),
                f"a region around the whole forward pass, but these nodes are outside: {', '.join(outside[:8])}",
            )
        return budgets.pop()
    marked = _torch.marked_memory_budget(joint.graph)
    if marked is not None:
        memory_budget = marked
        check_budget("memory budget of a node", memory_budget)
    if memory_budget is None:
        memory_budget = _torch.functorch_config.activation_memory_budget
        check_budget("torch._functorch.config.activation_memory_budget", memory_budget)
    return float(memory_budget)


def _compute_sides(
    graph: JointGraph, cost: CostModel, terms: list[Verdict], policy: RecomputePolicy, budget: float
) -> tuple[bytearray, int, int | None]:
    """The sides of all vertices, the bytes saved at a budget of 1, and those at 0 if they were computed."""
    weights, unit = save_weights(graph, cost, terms, policy)

    def saved_weight(side: bytearray) -> int:
        return sum(weights[i] or 0 for i in range(len(weights)) if _is_saved(i, side))

    network = build_network(graph, cost, terms, weights, priced=budget < 1)
    if budget == 1:
        side = cut_without_price(network)
        return side, saved_weight(side) // unit, None
    chain = chain_of_cuts(network)
    last = len(chain.steps)
    full, zero = saved_weight(chain.sides_after(0)), saved_weight(chain.sides_after(last))
    if budget == 0:
        side = chain.sides_after(last)
    else:
        allowed = zero // unit + int(budget * (full // unit - zero // unit))
        side = chain.sides_within((allowed + 1) * unit - 1 - (full - chain.weights[0]))
    return side, full // unit, zero // unit


def _curve(
    graph: JointGraph, cost: CostModel, terms: list[Verdict], policy: RecomputePolicy
) -> tuple[tuple[int, int], ...]:
    """Bytes saved and FLOPs of priced operations along the chain of cuts, from a budget of 1 down to 0."""
    weights, unit = save_weights(graph, cost, terms, policy)
    chain = chain_of_cuts(build_network(graph, cost, terms, weights, priced=True))
    side = chain.sides_after(0)
    decided = sum(weights[i] or 0 for i in range(len(weights)) if _is_saved(i, side)) - chain.weights[0]
    points = [((decided + w) // unit, f) for w, f in zip(chain.weights, chain.flops, strict=True)]
    stride = -(-len(points) // _CURVE_POINTS)
    return tuple(dict.fromkeys((*itertools.islice(points, 0, None, stride), points[-1])))


def _is_saved(node: int, side: bytearray) -> bool:
    return side[2 * node + 1] == BACKWARD and side[2 * node] != BACKWARD


class _Clock:
    """Measures the seconds spent in each part of the work."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._laps[part] = now - self._last
        self._last = now

    def laps(self) -> dict[str, float]:
        return {**self._laps, "total": time.perf_counter() - self._start}
