"""Split a captured graph into segments for the compiler and nodes that must run as Python.

A *segment* is the pure computation between two calls of user code. Accumulation into ``.grad`` and hooks of
leaves are delayed until their segment ends (nothing later in it can depend on them). Any other hook, and
every Python or opaque C++ backward, ends the segment. Nodes that only read a graph argument run first. The
*driver* is the captured graph with each segment replaced by one call.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from compiled_autograd.capture.captured_steps import Kind
from compiled_autograd.runtime._torch_nodes import NodeWriter
from compiled_autograd.runtime.executing import executable, graph_module


@dataclasses.dataclass
class FunctionalSegment:
    """Pure nodes of the captured graph, with their inputs and outputs."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    """Starts with the elements of the graph's ``inputs`` that nothing else uses."""
    outputs: list[fx.Node]
    module: fx.GraphModule
    """Takes (values, sizes, scalars): a list that it clears, and the two tuples of the whole graph."""

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """Run the module uncompiled."""
        return executable(self.module)

    @property
    def title(self) -> str:
        """The names of the first and last autograd node."""
        names = [node.meta.get("autograd_node", "?") for node in self.nodes]
        return f"{names[0]} to {names[-1]}"


def pick(values: list[Any], indices: Sequence[int]) -> list[Any]:
    """Return the elements at ``indices`` as a list that its receiver may clear."""
    return [values[index] for index in indices]


def _is_argument(node: fx.Node) -> bool:
    """Whether a node is an element of a graph argument."""
    return node.target is operator.getitem and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def _is_opaque(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_opaque(node.args[0])  # type: ignore[arg-type]
    return node.meta.get("kind", Kind.PURE) is not Kind.PURE


def _runs_first(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _runs_first(node.args[0])  # type: ignore[arg-type]
    return node.meta.get("kind") is Kind.READ


def _split_nodes(graph: fx.Graph) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Return (pure nodes, nodes that run after them) for each segment, in order."""
    split: list[tuple[list[fx.Node], list[fx.Node]]] = [([], [])]
    ended = False
    waiting: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or _is_argument(node) or _runs_first(node):
            continue
        if _is_opaque(node):
            split[-1][1].append(node)
            waiting.add(node)
            # Nodes that unpack the result of a barrier belong to the barrier.
            ended = ended or not str(node.meta.get("autograd_node", "")).endswith("AccumulateGrad")
            continue
        if ended or any(argument in waiting for argument in node.all_input_nodes):
            split.append(([], []))
            waiting.clear()
            ended = False
        split[-1][0].append(node)
    return split


def _segment(whole: fx.GraphModule, nodes: list[fx.Node], number: int) -> FunctionalSegment:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in inside and not _is_number(argument) and argument.op != "get_attr":
                inputs.setdefault(argument)
    ordered = sorted(inputs, key=lambda node: not _is_owned(node, inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    writer = NodeWriter(graph)
    values, sizes, scalars = (graph.placeholder(name) for name in ("values", "sizes", "scalars"))
    numbers = {"sizes": sizes, "scalars": scalars}
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(ordered):
        copies[node] = writer.call(operator.getitem, (values, index), node.name)
    graph.create_node("call_method", "clear", (values,), name="free_values")

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        if node not in copies:  # a size or a scalar
            source: Any = node.args[0]
            index = node.args[1]
            copies[node] = writer.call(operator.getitem, (numbers[source.name], index), node.name)
        return copies[node]

    for node in nodes:
        for argument in node.all_input_nodes:
            copy_of(argument)
        copies[node] = writer.copy(node, copy_of)
    graph.output(tuple(copies[node] for node in outputs))
    module = graph_module(whole, graph, f"BackwardSegment{number}")
    return FunctionalSegment(nodes, ordered, outputs, module)


def merge_inputs(segment: FunctionalSegment, first_positions: Sequence[int]) -> FunctionalSegment:
    """Return the segment for calls in which some inputs are the same tensor, which is passed once.

    ``first_positions`` has, per input, the position of the first one that is the same tensor.
    """
    kept = [position for index, position in enumerate(first_positions) if position == index]
    elements: dict[int, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    values = next(iter(segment.module.graph.nodes))
    for node in segment.module.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif node.target is operator.getitem and node.args[0] is values:
            position = first_positions[node.args[1]]
            if position not in elements:
                element = (copies[values], kept.index(position))
                elements[position] = graph.create_node(
                    "call_function", operator.getitem, element, name=node.name
                )
            copies[node] = elements[position]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    module = graph_module(segment.module, graph, f"{segment.module._get_name()}Merged")
    inputs = [segment.inputs[position] for position in kept]
    return FunctionalSegment(segment.nodes, inputs, segment.outputs, module)


def _is_owned(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node is an element of ``inputs`` that only these nodes use."""
    return _is_argument(node) and node.args[0].name == "inputs" and inside.issuperset(node.users)  # type: ignore[union-attr]


def _is_number(node: fx.Node) -> bool:
    """Whether a node is an element of ``sizes`` or ``scalars``."""
    return _is_argument(node) and node.args[0].name in ("sizes", "scalars")  # type: ignore[union-attr, operator]


def split_segments(module: fx.GraphModule) -> list[tuple[FunctionalSegment | None, list[fx.Node]]]:
    """Return the segments in order (None if nothing is computed), each with the nodes that run after it."""
    segments = []
    for number, (pure, others) in enumerate(_split_nodes(module.graph)):
        computes = any(node.target is not operator.getitem for node in pure)
        segment = _segment(module, pure, number) if computes else None
        segments.append((segment, others))
    return segments


def build_driver(
    module: fx.GraphModule,
    segments: Sequence[tuple[FunctionalSegment | None, list[fx.Node]]],
    callables: Sequence[Any],
) -> fx.GraphModule:
    """Return a graph with the arguments and outputs of ``module`` that calls one callable per segment.

    Each callable is called with (values, others, sizes, scalars). ``values`` holds inputs that only this
    segment uses, so that it can free each after its last use; ``others`` holds the rest.

    Args:
        module: the captured graph.
        segments: as `split_segments` returns them.
        callables: one per segment; None if there is no segment.
    """
    graph = fx.Graph()
    writer = NodeWriter(graph)
    env: dict[fx.Node, fx.Node] = {}
    arguments = [node for node in module.graph.nodes if node.op == "call_function" and _is_argument(node)]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.name)
    inputs, sizes, scalars = list(env.values())[:3]
    owned = _owned_inputs(segments)
    picked = {node for nodes in owned for node in nodes}
    lists = []
    for number, nodes in enumerate(owned):
        indices = tuple(node.args[1] for node in nodes)
        lists.append(graph.create_node("call_function", pick, (inputs, indices), name=f"values_{number}"))
    for node in arguments:
        if node not in picked and node.users:
            env[node] = writer.copy(node, env.__getitem__)
    for node in module.graph.nodes:
        if node.op == "call_method":  # clears a list
            writer.copy(node, env.__getitem__)
        elif node.op == "get_attr" or (node.op == "call_function" and _runs_first(node)):
            env[node] = writer.copy(node, env.__getitem__)
    for number, (segment, others) in enumerate(segments):
        if segment is not None:
            rest = tuple(env[node] for node in segment.inputs if node not in owned[number])
            call = graph.create_node(
                "call_function",
                callables[number],
                (lists[number], rest, sizes, scalars),
                name=f"segment_{number}",
            )
            for index, node in enumerate(segment.outputs):
                env[node] = writer.call(operator.getitem, (call, index), node.name)
        for node in others:
            env[node] = writer.copy(node, env.__getitem__)
    output = next(iter(reversed(module.graph.nodes)))
    graph.output(fx.node.map_arg(output.args[0], env.__getitem__))
    return graph_module(module, graph, "BackwardDriver")


def _owned_inputs(
    segments: Sequence[tuple[FunctionalSegment | None, list[fx.Node]]],
) -> list[dict[fx.Node, None]]:
    """Return, per segment, the elements of ``inputs`` that only it uses, in the segment's order."""
    owned: list[dict[fx.Node, None]] = []
    for segment, _ in segments:
        inside = set() if segment is None else set(segment.nodes)
        inputs = [] if segment is None else segment.inputs
        owned.append({node: None for node in inputs if _is_owned(node, inside)})
    return owned
