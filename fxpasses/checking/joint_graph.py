"""A forward and a backward graph as one graph with the interface of the joint graph they were cut from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpasses.checking.inputs import placeholders
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
    handed = [node for node in taken if node.name not in names or not node.name.startswith("tangents_")]
    count = len(outputs_of(joint.graph)) - len(outputs_of(backward.graph))
    inputs = [n for n in placeholders(forward) if n.name not in names]
    symbols = [n for n in handed if isinstance(value_of(n), (torch.SymInt, int))]
    rest = [n for n in handed if n not in symbols]
    saved = outputs_of(forward.graph)[count:]
    if inputs or len(saved) != len(handed):
        return None  # for example random states passed to both
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    by_name = {}
    for node in placeholders(joint):
        by_name[node.name] = graph.placeholder(node.name)
        by_name[node.name].meta = dict(node.meta)
    for node in placeholders(forward):
        inner[node] = by_name[node.name]
    outputs = _copied(forward.graph, graph, inner)
    values = outputs[count:]
    ordered = [*rest, *symbols]
    inner = {node: by_name[node.name] for node in taken if node not in handed}
    inner.update(zip(ordered, values, strict=True))
    results = _copied(backward.graph, graph, inner)
    graph.output([*outputs[:count], *results])
    return fx.GraphModule({**attributes_of(forward), **attributes_of(backward)}, graph)


def _copied(source: fx.Graph, graph: fx.Graph, inner: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copy the calls of a graph into another one, keeping their names. Return copies of its outputs.

    A call of the same values that is already there is not copied: what is recomputed has the same bits.
    """
    there = {node.name: node for node in graph.nodes}
    writes = any(map(is_mutating, source.nodes))
    for node in source.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inner.__getitem__)
        same = there.get(node.name)
        if same is None or writes or uses_rng(node):
            name = node.name if same is None else f"{node.name}_again"
            inner[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        elif (same.op, same.target, same.args, same.kwargs) == (node.op, node.target, args, kwargs):
            inner[node] = same
        else:
            inner[node] = graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_again")
        inner[node].meta = dict(node.meta)
    return [fx.node.map_arg(value, inner.__getitem__) for value in outputs_of(source)]
