"""A forward and a backward graph as one graph with the interface of the joint graph they were cut from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpasses.checking.execution.inputs import placeholders
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.rewriting import attributes_of, outputs_of, value_of


def joined_graph(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule
) -> fx.GraphModule | None:
    """Join a forward and a backward graph into one with the interface of their joint graph.

    Saved values are passed on as in AOTAutograd: in the forward graph's outputs, symbols last; in the
    backward graph's inputs, symbols first.

    Args:
        joint: the graph that they were cut from.
        forward: the forward graph.
        backward: the backward graph.

    Returns:
        The graph that runs one after the other; ``None`` if they take other inputs.
    """
    names = [node.name for node in placeholders(joint)]
    taken = placeholders(backward)
    saved_inputs = [node for node in taken if node.name not in names or not node.name.startswith("tangents_")]
    count = len(outputs_of(joint.graph)) - len(outputs_of(backward.graph))
    inputs = [n for n in placeholders(forward) if n.name not in names]
    symbols = [n for n in saved_inputs if isinstance(value_of(n), (torch.SymInt, int))]
    rest = [n for n in saved_inputs if n not in symbols]
    saved = outputs_of(forward.graph)[count:]
    if inputs or len(saved) != len(saved_inputs):
        return None  # for example random states passed to both
    graph = fx.Graph()
    node_map: dict[fx.Node, fx.Node] = {}
    by_name = {}
    for node in placeholders(joint):
        by_name[node.name] = graph.placeholder(node.name)
        by_name[node.name].meta = dict(node.meta)
    for node in placeholders(forward):
        node_map[node] = by_name[node.name]
    outputs = _copy_calls(forward.graph, graph, node_map)
    values = outputs[count:]
    ordered = [*rest, *symbols]
    node_map = {node: by_name[node.name] for node in taken if node not in saved_inputs}
    node_map.update(zip(ordered, values, strict=True))
    results = _copy_calls(backward.graph, graph, node_map)
    graph.output([*outputs[:count], *results])
    return fx.GraphModule({**attributes_of(forward), **attributes_of(backward)}, graph)


def _copy_calls(source: fx.Graph, graph: fx.Graph, node_map: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copy the calls of a graph into another one, keeping their names. Return copies of its outputs.

    A call of the same values that is already there is not copied: what is recomputed has the same bits.
    """
    existing = {node.name: node for node in graph.nodes}
    writes = any(map(is_mutating, source.nodes))
    for node in source.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), node_map.__getitem__)
        same = existing.get(node.name)
        if same is None or writes or uses_rng(node):
            name = node.name if same is None else f"{node.name}_again"
            node_map[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        elif (same.op, same.target, same.args, same.kwargs) == (node.op, node.target, args, kwargs):
            node_map[node] = same
        else:
            node_map[node] = graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_again")
        node_map[node].meta = dict(node.meta)
    return [fx.node.map_arg(value, node_map.__getitem__) for value in outputs_of(source)]
