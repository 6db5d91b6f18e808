"""The forward and backward modules, once it is decided what is saved."""

import torch
import torch.fx as fx

from . import _torch
from .classify import JointGraph

__all__ = ["extract"]


def extract(
    joint: fx.GraphModule, graph: JointGraph, saved: list[int], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Build both modules in AOTAutograd's calling convention.

    Args:
        saved: numbers of the nodes to save, ascending.
    """
    nodes = [
        _copied_before_mutation(graph, i) if i in graph.mutated_inputs else graph.nodes[i] for i in saved
    ]
    symbols = [n for n in nodes if _torch.is_sym_node(n) and not _torch.is_assert_only_bool(n)]
    opaque = [n for n in nodes if _torch.is_opaque(n)]
    tensors = [n for n in nodes if not _torch.is_sym_node(n) and not _torch.is_opaque(n)]
    recomputes = _torch.has_recomputable_ops(joint)
    random = recomputes and _torch.has_recomputable_rng_ops(joint)
    forward, backward = _torch.extract_modules(
        joint,
        tensors,
        symbols,
        opaque,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes={graph.nodes[i]: None for i in graph.static_inputs}.keys(),
    )
    if random:
        forward, backward = _torch.functionalize_rng_ops(joint, forward, backward, len(symbols))
    backward = _torch.reordering_to_mimic_autograd_engine(backward)
    forward = _torch.raise_getitems(forward)
    backward = _torch.raise_getitems(backward)
    forward = _torch.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = _torch.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def _copied_before_mutation(graph: JointGraph, i: int) -> fx.Node:
    """A copy of an input that is overwritten once the forward pass is over: what is saved must be its old value."""
    original = graph.nodes[i]
    readers = [graph.nodes[u] for u in graph.users[i] if not _torch.must_be_in_forward(graph.nodes[u])]
    owner = original.graph
    with owner.inserting_after(next(reversed(owner.find_nodes(op="placeholder")))):
        copy = owner.call_function(torch.ops.aten.clone.default, (original,))
    copy.meta.update({key: value for key, value in original.meta.items() if key != "desc"})
    for reader in readers:
        reader.replace_input_with(original, copy)
    return copy
