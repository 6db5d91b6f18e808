"""Values of a joint graph that the backward pass reads or computes, for passes that shrink saved values."""

from __future__ import annotations

from torch import fx

from fxpasses.graphs.provenance import is_backward


def depending_on_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the tangents of a joint graph, and all values that depend on one."""
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_tangent or not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    return depends


def read_by_backward(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each call that does not depend on tangents to the calls of the backward pass that read it.

    Keys and readers are in graph order. Calls that the backward pass does not read are omitted.
    """
    depends = depending_on_gradients(graph)
    read: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node in depends or is_backward(node):
            for value in node.all_input_nodes:
                if value not in depends and value.op == "call_function":
                    read.setdefault(value, []).append(node)
    return read
