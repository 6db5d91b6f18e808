"""The autograd nodes of a backward pass as seen from Python, and the order in which eager runs them.

`walk` replicates the walk of ``_compiled_autograd_impl`` (a stack; a node is pushed once its last dependent
was seen), so its indices equal those that C++ gives to the compiler. `eager_order` replicates the engine's
ready queue (``ReadyQueue``, ``CompareNodeTaskTime``): highest sequence number first, with ties among gradient
accumulators broken as in libstdc++'s binary heap.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_ROOT_SEQUENCE_NR = -1


@dataclasses.dataclass(slots=True)
class WalkedNode:
    """A node that runs in this pass."""

    node: Any
    """The autograd node, or None for the engine's artificial root."""
    name: str
    sequence_nr: int
    edges: list[int]
    """Indices of the nodes that its outputs flow into, one per edge that runs."""
    needed: bool
    """False if only its gradient is wanted (an input of ``grad``) and the node itself does not run."""


def edge_of(tensor_or_edge: Any) -> tuple[Any, int]:
    """Return (autograd node, index of its input) that a tensor's gradient, or a gradient edge, flows into.

    The node is None for a leaf of a transform that has ended (in the result of ``torch.func.vjp``), as no
    operation leads to it.
    """
    if not isinstance(tensor_or_edge, torch.Tensor):
        return tensor_or_edge.node, tensor_or_edge.output_nr
    tensor = tensor_or_edge
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    with (
        torch.enable_grad()
    ):  # any operation whose backward leads to the leaf, except a view, which few layouts support
        copied = tensor.clone().grad_fn
    return (None, 0) if copied is None else copied.next_functions[0]


def _nodes_of(inputs: Sequence[Any], reachable: Iterable[Any]) -> set[Any]:
    """Return the nodes that the inputs' gradients flow into. Used leaves are found via reachable nodes."""
    leaves = {id(node.variable): node for node in reachable if type(node).__name__ == "AccumulateGrad"}
    return {leaves.get(id(given)) or edge_of(given)[0] for given in inputs} - {None}


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _dependencies(roots: list[Any]) -> dict[Any, int]:
    counts: dict[Any, int] = dict.fromkeys(roots, 0)
    pending = list(counts)
    for root in roots:
        counts[root] += 1
    seen = set(pending)
    while pending:
        for child in _children(pending.pop()):
            counts[child] = counts.get(child, 0) + 1
            if child not in seen:
                seen.add(child)
                pending.append(child)
    return counts


def _needed(roots: list[Any], wanted: set[Any], accumulate: bool) -> tuple[set[Any], set[Any]]:
    """Return the nodes that run, and the nodes that run or whose gradient is wanted."""
    executes: dict[Any, bool] = {}
    needed: set[Any] = set(wanted) if accumulate else set()
    for root in roots:
        stack = [(root, iter(_children(root)))]
        while stack:
            node, children = stack[-1]
            if node in executes:
                stack.pop()
                continue
            child = next((child for child in children if child not in executes), None)
            if child is not None:
                stack.append((child, iter(_children(child))))
                continue
            if any(executes[child] for child in _children(node)):
                needed.add(node)
            executes[node] = node in needed or node in wanted
            stack.pop()
    return needed, {node for node, runs in executes.items() if runs}


def walk(outputs: Sequence[Any], inputs: Sequence[Any], accumulate: bool) -> list[WalkedNode]:
    """Return the nodes of a pass, by C++'s index. Index 0 is the engine's own root.

    Args:
        outputs: the tensors or gradient edges that the pass starts from.
        inputs: those whose gradients are requested; if empty, every reachable node runs.
        accumulate: whether gradients go into ``.grad``, as in ``backward``.
    """
    roots = [edge_of(output)[0] for output in outputs]
    dependencies = _dependencies(roots)
    needed = executing = None
    if inputs:
        needed, executing = _needed(roots, _nodes_of(inputs, dependencies), accumulate)
    nodes: list[WalkedNode] = []
    indices: dict[Any, int] = {}
    edges_of: list[list[Any]] = []
    seen: dict[Any, int] = {}
    stack: list[Any] = [None]
    while stack:
        node = stack.pop()
        children = roots if node is None else _children(node)
        if executing is not None:
            children = [child for child in children if child in executing]
        runs = node is None or needed is None or node in needed
        indices[node] = len(nodes)
        name = "GraphRoot" if node is None else node.name()
        sequence_nr = _ROOT_SEQUENCE_NR if node is None else node._sequence_nr()
        nodes.append(WalkedNode(node, name, sequence_nr, [], runs))
        edges_of.append(children if runs else [])
        for child in children if runs else []:
            seen[child] = seen.get(child, 0) + 1
            if seen[child] == dependencies[child]:
                stack.append(child)
    for walked, children in zip(nodes, edges_of, strict=True):
        walked.edges = [indices[child] for child in children if child in indices]
    return nodes


def _push(heap: list[tuple[int, int]], item: tuple[int, int]) -> None:
    """``std::push_heap``, ordered by sequence number alone."""
    heap.append(item)
    _sift_up(heap, len(heap) - 1, 0, item)


def _sift_up(heap: list[tuple[int, int]], hole: int, top: int, item: tuple[int, int]) -> None:
    parent = (hole - 1) // 2
    while hole > top and heap[parent][0] < item[0]:
        heap[hole] = heap[parent]
        hole, parent = parent, (parent - 1) // 2
    heap[hole] = item


def _pop(heap: list[tuple[int, int]]) -> tuple[int, int]:
    """``std::pop_heap``, ordered by sequence number alone."""
    top, item = heap[0], heap.pop()
    length = len(heap)
    if not length:
        return top
    hole = second = 0
    while second < (length - 1) // 2:
        second = 2 * (second + 1)
        if heap[second][0] < heap[second - 1][0]:
            second -= 1
        heap[hole] = heap[second]
        hole = second
    if length % 2 == 0 and second == (length - 2) // 2:
        second = 2 * (second + 1)
        heap[hole] = heap[second - 1]
        hole = second - 1
    _sift_up(heap, hole, 0, item)
    return top


def eager_order(nodes: Sequence[WalkedNode]) -> list[int]:
    """Return the indices of ``nodes`` in the order in which the engine evaluates them on one CPU thread."""
    waiting = [0] * len(nodes)
    for walked in nodes:
        for edge in walked.edges:
            waiting[edge] += 1
    order: list[int] = []
    heap: list[tuple[int, int]] = [(nodes[0].sequence_nr, 0)]
    while heap:
        _, index = _pop(heap)
        order.append(index)
        for edge in nodes[index].edges:
            waiting[edge] -= 1
            if not waiting[edge]:
                _push(heap, (nodes[edge].sequence_nr, edge))
    return order
