"""Write the forward and backward modules once the saved values are chosen.

Both graphs are written once, directly from the joint graph, with only what they need. Each recomputed
operation comes right before its first reader, so that its result does not outlive it by much. Each value
extracted from a tuple comes right after the tuple.
"""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from fxpasses.partitioner import _torch
from fxpasses.partitioner.classify import JointGraph


@dataclasses.dataclass(frozen=True)
class _Saved:
    """Numbers of the values saved for backward, in the sections of AOTAutograd's calling convention."""

    tensors: list[int]
    tensors_without_version_check: list[int]
    opaque: list[int]
    symbols: list[int]


def extract(
    joint: fx.GraphModule, graph: JointGraph, saved: Iterable[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Build both modules in AOTAutograd's calling convention.

    Forward: primals (and seeds) to the caller's outputs, saved tensors, saved opaque objects, saved symbols.
    Backward: saved symbols, tensors and opaque objects, tangents, seeds and backward state to gradients.

    Args:
        saved: numbers of the nodes to save. Those that the backward graph does not read are omitted.
    """
    needed, read = _needed_in_backward(graph, frozenset(saved))
    sections = _sort_into_sections(joint, graph, sorted(read), needed)
    forward_graph = _forward_graph(graph, sections)
    backward_graph = _backward_graph(graph, sections, needed)
    forward = _torch.make_graph_module(joint, forward_graph)
    backward = _torch.make_graph_module(joint, backward_graph)
    tensors = [*sections.tensors, *sections.tensors_without_version_check]
    _torch.apply_user_rewrites(
        [graph.nodes[i] for i in tensors],
        forward,
        backward,
        [graph.nodes[i] for i in sorted(graph.static_inputs)],
        graph.num_forward_outputs,
    )
    if _torch.has_recomputable_rng_ops(joint):
        behind = len(sections.opaque) + len(sections.symbols)
        forward, backward = _torch.functionalize_rng_ops(joint, forward, backward, behind)
        _put_opaque_last(backward)
    forward = _torch.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = _torch.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def _put_opaque_last(backward: fx.GraphModule) -> None:
    """Move saved opaque objects after the RNG states: saved tensors that torch adds before the tangents."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    first_tangent = next(k for k, node in enumerate(placeholders) if _torch.is_tangent(node))
    for node in filter(_torch.is_opaque, placeholders[:first_tangent]):
        placeholders[first_tangent].prepend(node)
    backward.recompile()


def _needed_in_backward(graph: JointGraph, saved: frozenset[int]) -> tuple[bytearray, set[int]]:
    """The nodes that the backward graph runs, and the saved nodes that it reads."""
    needed = bytearray(len(graph.nodes))
    read: set[int] = set()
    wanted = [graph.index[n] for n in graph.outputs[graph.num_forward_outputs :] if isinstance(n, fx.Node)]
    for i in (*wanted, *(i for i, node in enumerate(graph.nodes) if graph.in_backward[i] and graph.live[i])):
        needed[i] = 1
    for i in range(len(graph.nodes) - 1, -1, -1):
        if not needed[i]:
            continue
        if i in saved:
            needed[i] = 0
            read.add(i)
        elif graph.nodes[i].op == "placeholder":
            needed[i] = 0
        else:
            for j in graph.inputs[i]:
                needed[j] = 1
    return needed, read


def _sort_into_sections(
    joint: fx.GraphModule, graph: JointGraph, saved: list[int], needed: bytearray
) -> _Saved:
    """Sort saved values into sections, and add the symbols that their sizes mention.

    Symbols that are themselves values of nodes come first: the backward graph's compiler binds sizes to them
    before it meets an expression that contains them.

    Args:
        joint: the joint graph.
        graph: the same graph, numbered.
        saved: the saved values.
        needed: the nodes that the backward graph runs. A data-dependent size that it computes (``nonzero`` in
            the gradient of ``x[mask] = v``) may be known to equal a size of the forward graph.
    """
    tensors: list[int] = []
    unchecked: list[int] = []
    opaque: list[int] = []
    binding: list[int] = []
    derived: list[int] = []
    for i in saved:
        node = graph.nodes[i]
        if isinstance(node.meta.get("val"), _torch.BackwardState):
            continue  # AOTAutograd passes it to both graphs itself
        if _torch.is_sym_node(node):
            (derived if _torch.symbol_bound_by(node) is None else binding).append(i)
        elif _torch.is_opaque(node):
            opaque.append(i)
        elif node.meta.get("saved_tensor_with_no_vc_check", False):
            unchecked.append(i)
        else:
            tensors.append(i)
    known = {_torch.symbol_bound_by(graph.nodes[i]) for i in binding}
    tangents = [i for i, node in enumerate(graph.nodes) if _torch.is_tangent(node)]
    unbacked = [i for i, node in enumerate(graph.nodes) if needed[i] and "unbacked_bindings" in node.meta]
    bindings = _torch.symbol_bindings(joint.graph)
    for i in (*derived, *tensors, *unchecked, *tangents, *unbacked):
        for symbol in _torch.symbols_in(graph.nodes[i].meta.get("val")):
            if symbol not in known:
                known.add(symbol)
                bound = graph.index[bindings[symbol]] if symbol in bindings else None
                # What the backward graph computes has symbols of its own, except those that the forward graph
                # knows.
                if bound is not None and not (needed[i] and (needed[bound] or graph.in_backward[bound])):
                    binding.append(bound)
    return _Saved(tensors, unchecked, opaque, [*dict.fromkeys(binding), *derived])


class _Writer:
    """Writes a graph from nodes of the joint graph, operands before their readers."""

    def __init__(self, graph: JointGraph, needed: bytearray) -> None:
        self.joint = graph
        self.graph = fx.Graph()
        self._needed = needed
        self._new: dict[int, fx.Node] = {}

    def placeholder(self, i: int, name: str | None = None) -> None:
        """Make node `i` an input of the new graph, whatever it is in the joint graph."""
        old = self.joint.nodes[i]
        new = self.graph.placeholder(name or old.name)
        new.meta = dict(old.meta)
        self._new[i] = new

    def copy(self, i: int) -> None:
        """Write node `i` if it is needed and not written yet, after everything that it needs."""
        pending = [i]
        while pending:
            current = pending[-1]
            missing = [j for j in self.joint.inputs[current] if j not in self._new]
            if current in self._new or not missing:
                pending.pop()
                self._write(current)
            else:
                pending.extend(reversed(missing))

    def _write(self, i: int) -> None:
        if i in self._new:
            return
        self._new[i] = self.graph.node_copy(self.joint.nodes[i], self.value)
        for user in self.joint.users[i]:
            if (
                self._needed[user]
                and self.joint.nodes[user].target is operator.getitem
                and user not in self._new
            ):
                self._write(user)

    def value(self, old: fx.Node) -> fx.Node:
        """The new node that corresponds to a node of the joint graph."""
        return self._new[self.joint.index[old]]

    def renamed_copy(self, i: int) -> fx.Node:
        """Copy an input that is overwritten later. Backward readers of the input read the copy."""
        original = self._new[i]
        name = _name_when_saved(self.joint, i)
        copied = self.graph.create_node("call_function", torch.ops.aten.clone.default, (original,), name=name)
        copied.meta = {key: value for key, value in original.meta.items() if key != "desc"}
        return copied


def _name_when_saved(graph: JointGraph, i: int) -> str:
    """The name of a saved node. A saved copy of an overwritten input gets its own name."""
    name = graph.nodes[i].name
    return f"{name}_before" if i in graph.mutated_inputs else name


def _forward_graph(graph: JointGraph, saved: _Saved) -> fx.Graph:
    needed = bytearray(graph.in_forward)
    saved_values = [*saved.tensors, *saved.tensors_without_version_check, *saved.opaque, *saved.symbols]
    for i in saved_values:
        needed[i] = 1
    for i in range(len(graph.nodes) - 1, -1, -1):
        if needed[i]:
            for j in graph.inputs[i]:
                needed[j] = 1
    writer = _Writer(graph, needed)
    seeds = [i for i, node in enumerate(graph.nodes) if _torch.is_forward_seed(node)]
    for i in (*graph.primals, *seeds):
        writer.placeholder(i)
    copies = {i: writer.renamed_copy(i) for i in saved_values if i in graph.mutated_inputs}
    for i, node in enumerate(graph.nodes):
        if needed[i] and node.op != "placeholder":
            writer.copy(i)
    outputs = [writer.value(n) if isinstance(n, fx.Node) else n for n in graph.forward_outputs]
    outputs += [copies.get(i, writer.value(graph.nodes[i])) for i in saved_values]
    unchecked = range(len(saved.tensors), len(saved.tensors) + len(saved.tensors_without_version_check))
    descriptions = graph.output_descriptions[: graph.num_forward_outputs] + [
        _torch.saved_value_description(k, k in unchecked) for k in range(len(saved_values))
    ]
    return _finish(writer.graph, outputs, descriptions)


def _backward_graph(graph: JointGraph, saved: _Saved, needed: bytearray) -> fx.Graph:
    writer = _Writer(graph, needed)
    nodes = graph.nodes
    for i in (*saved.symbols, *saved.tensors, *saved.tensors_without_version_check, *saved.opaque):
        writer.placeholder(i, _name_when_saved(graph, i))
    for kind in (_torch.is_tangent, _torch.is_backward_seed, _is_backward_state):
        for i, node in enumerate(nodes):
            if kind(node):
                writer.placeholder(i)
    wanted = frozenset(graph.tangent_free_outputs)
    for i, node in enumerate(nodes):
        if needed[i] and (graph.in_backward[i] or i in wanted) and node.op != "placeholder":
            writer.copy(i)
    outputs = graph.outputs[graph.num_forward_outputs :]
    new = _finish(
        writer.graph,
        [writer.value(node) if isinstance(node, fx.Node) else node for node in outputs],
        graph.output_descriptions[graph.num_forward_outputs :],
    )
    for node in new.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return new


def _is_backward_state(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), _torch.BackwardState)


def _finish(new: fx.Graph, outputs: list[Any], descriptions: list[Any]) -> fx.Graph:
    output = new.output(tuple(outputs))
    output.meta["desc"] = descriptions
    output.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, fx.Node) else None for value in outputs
    ]
    new.lint()
    return new
