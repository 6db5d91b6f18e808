"""Helpers for passes: new nodes that keep metadata and provenance, and questions about node values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxpasses._torch import FakeTensor, detect_fake_mode

__all__ = ["copy_graph", "fake_mode_of", "insert_call", "replace", "same_metadata", "same_size", "value_of"]

_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "fxpasses", "recompute", "ac_graph_id", "partitioner_tag", "custom", "autograd_backward")  # fmt: skip


def value_of(node: fx.Node) -> Any:
    """The fake value of a node (``meta["val"]``), or ``None`` where there is none."""
    return node.meta.get("val")


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake mode that the graph's values belong to, or ``None``."""
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return detect_fake_mode()


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Insert a call at the graph's insert point, with its fake value computed and ``like``'s provenance."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update({key: like.meta[key] for key in _PROVENANCE if key in like.meta})
    fake_args, fake_kwargs = map_arg((node.args, node.kwargs), value_of)
    mode = fake_mode_of(graph)
    with torch.no_grad(), mode if mode is not None else torch.device("meta"):
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares tensors and fake values with the original, but no nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = fx.GraphModule(gm, graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    copied.meta = copy.copy(gm.meta)
    return copied


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let every user of ``old`` use ``new``, and erase ``old``."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def same_metadata(a: Any, b: Any) -> bool:
    """Whether two fake values have the same shape, stride, dtype and device, known without a guard."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype is not b.dtype or a.device != b.device or a.layout is not b.layout or a.dim() != b.dim():
        return False
    if a.layout is not torch.strided:
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(same_size(x, y) for x, y in pairs)


def same_size(x: Any, y: Any) -> bool:
    """Whether two sizes are equal, known without a guard: symbolic ones if they are the same expression."""
    if isinstance(x, int) and isinstance(y, int):
        return x == y
    return getattr(getattr(x, "node", None), "expr", x) == getattr(getattr(y, "node", None), "expr", y)
