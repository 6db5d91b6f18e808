"""Shrink a graph on which a pass is wrong to the few nodes that it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.fx import LazyGraphModule
from fxpasses.checking.comparison.windows import changed_nodes
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import Run
from fxpasses.checking.faults.blame import minimize_subset
from fxpasses.graphs.aliasing import is_mutating
from fxpasses.graphs.rewriting import constants_of, subgraphs, value_of

_SEED = 20


@dataclass(frozen=True)
class Case:
    """A graph and inputs on which something fails.

    Attributes:
        gm: the graph.
        inputs: what to run it on.
        traced: inputs with the sizes that it was traced with, if those differ: sizes are then symbolic.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    traced: list[Any] | None = None

    @property
    def size(self) -> int:
        """The number of operator calls."""
        return sum(node.op == "call_function" for node in self.gm.graph.nodes)


Fails = Callable[[Case], bool]


def reduce_nodes(case: Case, after: fx.GraphModule | None, suspects: Collection[str], fails: Fails) -> Case:
    """Find the smallest part of the graph that fails, or the case. Args: those of :func:`failing_part`."""
    part = failing_part(case, after, suspects, fails)
    return part or failing_part(case, after, suspects, fails, whole=True) or case


def failing_part(
    case: Case, after: fx.GraphModule | None, suspects: Collection[str], fails: Fails, whole: bool = False
) -> Case | None:
    """Find the smallest part of the graph that still fails; ``None`` if none is found.

    A part is a set of calls. Values from outside become inputs, with their value in a run of the whole graph;
    values used outside become outputs. First the surroundings of the suspects are tried, one step wider at a
    time, then those of everything that the pass changed; then single calls are removed.

    Args:
        case: what fails.
        after: the graph after the pass, which tells where to start; ``None`` if the pass raises.
        suspects: names of nodes to blame.
        fails: whether a part still fails.
        whole: whether to start with all calls instead of the surroundings of the suspects.
    """
    values = _node_values(case.gm, case.inputs)
    traced = _node_values(case.gm, case.traced) if case.traced is not None else None
    calls = [n for n in case.gm.graph.nodes if n.op == "call_function"]

    constants = False

    def part(chosen: Iterable[fx.Node]) -> Case | None:
        return extract_calls(case.gm, set(chosen), values, traced, constants=constants)

    def part_fails(chosen: list[fx.Node]) -> bool:
        smaller = part(chosen)
        return smaller is not None and fails(smaller)

    # First turn the graph's constants into inputs, then keep them: a pass may look for them.
    for keep in (False, True) if constants_of(case.gm) else (False,):
        constants = keep
        near = [set(calls)] if whole else _neighborhoods(case.gm, after, suspects)
        starts = ([n for n in calls if n in chosen] for chosen in near)
        start = next(
            (start for start in starts if start and (whole or len(start) < len(calls)) and part_fails(start)),
            None,
        )
        if start is not None:
            return part(minimize_subset(start, part_fails))
    return None  # fails only with the graph's own inputs and outputs


def _neighborhoods(
    gm: fx.GraphModule, after: fx.GraphModule | None, suspects: Collection[str]
) -> Iterator[set[fx.Node]]:
    """Yield wider and wider sets of nodes around the suspects, then around everything that changed."""
    names = set(suspects)
    changed: set[str] = set()
    if after is not None:
        old, new = changed_nodes(gm, after)
        changed = old | {v.name for n in after.graph.nodes if n.name in new for v in n.all_input_nodes}
    for start in (names, changed):
        near = {n for n in gm.graph.nodes if n.name in start and n.op == "call_function"}
        for _ in range(5):
            yield near
            near = near | {m for n in near for m in (*n.all_input_nodes, *n.users) if m.op == "call_function"}


def _node_values(gm: fx.GraphModule, inputs: list[Any]) -> dict[str, Any]:
    run = Run(gm, keep=True)
    run(cloned(inputs), _SEED)
    return run.values


def extract_calls(
    gm: fx.GraphModule,
    chosen: set[fx.Node],
    values: dict[str, Any],
    traced: dict[str, Any] | None = None,
    returned: Collection[fx.Node] = (),
    constants: bool = False,
) -> Case | None:
    """Make a graph of some calls alone, with recorded values as inputs.

    A call that returns several values is kept together with its ``getitem`` calls.

    Args:
        gm: the graph.
        chosen: the calls.
        values: the value of each node, by name.
        traced: fake values of the nodes, by name, to keep.
        returned: the nodes to return; by default those that are used elsewhere, in the order of the graph.
        constants: whether tensors that the graph holds stay constants; else they become inputs.

    Returns:
        The graph and its inputs; ``None`` if nothing is left.
    """
    chosen = {n for n in chosen if n.target is not operator.getitem or n.args[0] in chosen}
    for node in list(chosen):
        chosen |= {user for user in node.users if user.target is operator.getitem and _returns_several(node)}
    graph = fx.Graph()
    held = {*subgraphs(gm), *(constants_of(gm) if constants else ())}
    made: dict[fx.Node, fx.Node] = {}
    inputs: list[str] = []
    outputs: list[fx.Node] = []
    writes = False
    needed = {v for n in chosen for v in n.all_input_nodes if v not in chosen}
    if traced is not None:  # a pass may ask for the sizes themselves
        needed |= {n for n in gm.graph.find_nodes(op="placeholder") if isinstance(value_of(n), torch.SymInt)}
    for node in gm.graph.nodes:
        if node in needed and node.op == "get_attr" and str(node.target) in held:
            made[node] = graph.node_copy(node)  # a graph cannot be an input
        elif node in needed:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
            inputs.append(node.name)
        elif node in chosen:
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = dict(node.meta)
            writes = writes or is_mutating(node)
            # A write shows in what it writes to: a pass may remove it only if its result is unused.
            outside = any(user not in chosen for user in node.users) or not (node.users or is_mutating(node))
            if (
                (node in returned if returned else outside)
                and not _returns_several(node)
                and value_of(node) is not None
            ):
                outputs.append(made[node])
    if not outputs and not writes:
        return None
    graph.output(tuple(outputs))
    others = None if traced is None else [traced[name] for name in inputs]
    return Case(LazyGraphModule(gm, graph), [values[name] for name in inputs], others)


def _returns_several(node: fx.Node) -> bool:
    return isinstance(value_of(node), (tuple, list))


def smaller_sizes(case: Case, rebuild: Callable[[Case], Case | None], fails: Fails) -> Case:
    """Shrink each size of a case as far as it still fails.

    A size is a number that occurs as a dimension of an input. Its multiples among the graph's arguments
    shrink along, so that a view of ``[batch * time, width]`` remains one.

    Args:
        case: what fails; its graph has numbers for sizes.
        rebuild: recomputes the metadata of a changed graph; ``None`` if its sizes do not fit together.
        fails: whether a case still fails.
    """
    sizes = sorted({n for v in case.inputs if isinstance(v, Tensor) for n in v.shape if n > 1}, reverse=True)
    for size in sizes:
        for small in (1, 2, 3, size // 2):
            if small < size:
                shrunk = rebuild(_replace_size(case, size, small))
                if shrunk is not None and fails(shrunk):
                    case = shrunk
                    break
    return case


def _replace_size(case: Case, size: int, small: int) -> Case:
    def number(value: Any) -> Any:
        if type(value) is int and value and value % size == 0:
            return value // size * small
        return value

    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in case.gm.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "call_function" and _takes_sizes(node):
            made[node].args = fx.node.map_aggregate(made[node].args, number)
    inputs = [_narrowed(v, size, small) if isinstance(v, Tensor) else number(v) for v in case.inputs]
    return Case(LazyGraphModule(case.gm, graph), inputs)


def _takes_sizes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any("size" in a.name or "shape" in a.name for a in schema.arguments)


def _narrowed(value: Tensor, size: int, small: int) -> Tensor:
    for dim, length in enumerate(value.shape):
        if length == size:
            value = value.narrow(dim, 0, small)
    order = sorted(range(value.dim()), key=lambda d: -int(value.stride()[d]))
    inverse = sorted(range(value.dim()), key=order.__getitem__)
    return (
        value.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
        if value.dim()
        else value
    )
