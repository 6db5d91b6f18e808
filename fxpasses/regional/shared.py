"""Values that all copies of a region compute from the same tensor, such as a bias from a shared mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graphs.aliasing import is_random
from fxpasses.graphs.rewriting import nbytes_of, value_of
from fxpasses.regional import _torch


def recompute_from_shared(joint: fx.GraphModule, shared: Sequence[bool]) -> list[fx.Node]:
    """Mark values for recomputation in a region's backward pass, so that not every copy saves them.

    Whole-graph compilation computes and saves such a value once. Here each copy has its own, computed from a
    common tensor. Saving that tensor costs nothing, and recomputing elementwise results is cheap.

    Args:
        joint: AOTAutograd's joint graph of a region.
        shared: for each of the region's inputs, whether all copies get the same tensor and it needs no
            gradient.

    Returns:
        The marked nodes.
    """
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if str(n.target).startswith("primals")]
    if len(inputs) != len(shared) or not any(shared):
        return []
    known = {node for node, is_shared in zip(inputs, shared, strict=True) if is_shared}
    largest = {node: nbytes_of(value_of(node)) for node in known}
    marked = []
    for node in joint.graph.nodes:
        reads = node.all_input_nodes
        if (
            node.op != "call_function"
            or not _is_cheap(node)
            or not all(n in known or _is_constant(n) for n in reads)
        ):
            continue
        if not any(n in known for n in reads):
            continue
        known.add(node)
        largest[node] = max(largest[n] for n in reads if n in known)
        if (
            nbytes_of(value_of(node)) >= largest[node]
        ):  # otherwise saving the value in each copy takes less than saving its source
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked.append(node)
    return marked


def _is_cheap(node: fx.Node) -> bool:
    """Whether the node is elementwise, or returns a view."""
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target._schema.is_mutable or is_random(node):
        return False
    gives_view = any(argument.alias_info is not None for argument in target._schema.arguments)
    return isinstance(node.meta.get("val"), torch.Tensor) and (
        torch.Tag.pointwise in target.tags or gives_view
    )


def _is_constant(node: fx.Node) -> bool:
    """Whether the node fills a tensor with a constant."""
    return node.op == "call_function" and not node.all_input_nodes and not is_random(node)
