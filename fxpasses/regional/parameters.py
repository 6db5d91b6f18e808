"""Find parameters and buffers of a graph, and the calls that gather them from other processes."""

from __future__ import annotations

import torch
from torch import fx

from fxpasses.regional import _torch, _torch_dtensor
from fxpasses.regional.sizes import is_literal, value_of
from fxpasses.regional.writes import changed_memory, target_name

_PREPARING = frozenset(
    {
        "bfloat16", "contiguous", "detach", "double", "flatten", "float", "getattr", "half", "pad", "reshape", "to", "type",
        "view",
    }
)  # fmt: skip
"""What may be done to a shard before it is sent."""


def is_static(node: fx.Node) -> bool:
    """Whether an input of the graph is a parameter or buffer, which lives as long as the model."""
    if node.op != "placeholder":
        return node.op == "get_attr"
    kept = node.meta.get("tensor_dict") or {}
    return bool(kept.get("_dynamo_static_input_type")) or isinstance(value_of(node), torch.nn.Parameter)


def gathered_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls that gather parameters, and those that prepare a shard for that.

    They occur between a layer's calls, where each parameter is first used, but depend on nothing that the
    layer computes. A region is the rest of the layer, and takes the gathered tensors. In the surrounding
    graph the gathers are adjacent, and passes over collectives see them. This includes wraps of tensors that
    a region takes as local tensors.
    """
    own: dict[fx.Node, bool] = {}
    changing = changed_memory(graph.nodes)
    plain = True
    for node in graph.nodes:
        if node.op == "placeholder" or node.op == "get_attr":
            continue
        if _torch.sets_grad_mode(node) or "_nesting" in target_name(node):
            plain = False  # the region would be called under another gradient mode or transform
        inputs = [n for n in node.all_input_nodes if not is_literal(n) and _mesh(n) is None]
        gathers = _torch_dtensor.wraps_or_gathers(node)
        if not plain or not inputs or not (gathers or target_name(node) in _PREPARING):
            continue
        if isinstance(node.target, _torch_dtensor.WrapLocal) or all(
            n in own or (is_static(n) and _storage(n) not in changing) for n in inputs
        ):
            own[node] = gathers
    needed: set[fx.Node] = set()
    for node, gathers in reversed(own.items()):
        if gathers or any(user in needed for user in node.users):
            needed.add(node)
    return needed


def _mesh(node: fx.Node) -> object:
    return _torch_dtensor.mesh_of(value_of(node))


def _storage(node: fx.Node) -> int | None:
    value = value_of(node)
    return _torch.storage_of(value) if isinstance(value, torch.Tensor) else None
