"""Outputs of a functional ATen graph without shared memory, and how the originals are made of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxpasses.regional import _torch
from fxpasses.regional.compiled_region import PREVIOUS, Source, Step, TensorSpec

aten = torch.ops.aten
_UNDECLARED_VIEWS = {aten._unsafe_view.default, aten.lift_fresh.default}
"""Operators that give a view though their schema does not say so."""


def separate_aliases(gm: fx.GraphModule, outputs: Sequence[Any]) -> tuple[list[fx.Node], list[Source | None]]:
    """Choose the outputs of a graph so that no two share memory, and the views that make the wanted ones of them.

    Args:
        gm: a graph without mutation.
        outputs: the nodes wanted, each a tensor or ``None``, in order.

    Returns:
        The nodes to return, in order of first need, and for each output where it comes from. An output that is
        (a view of) an input comes from that placeholder, counted among the graph's tensor placeholders.
    """
    tensors = [
        n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    number = {node: i for i, node in enumerate(tensors)}
    chains = [_chain(node) if isinstance(node, fx.Node) else None for node in outputs]
    shared: dict[fx.Node, set[fx.Node]] = {}
    for node, chain in zip(outputs, chains, strict=True):
        if chain is not None:
            shared.setdefault(chain[0], set()).add(node)
    returned: dict[fx.Node, int] = {}
    sources: list[Source | None] = []
    for node, chain in zip(outputs, chains, strict=True):
        if chain is None:
            sources.append(None)
            continue
        root, views = chain
        steps = _steps(views)
        if root in number and steps is not None:
            sources.append(Source(True, number[root], steps))
        elif root not in number and len(shared[root]) == 1:
            sources.append(Source(False, returned.setdefault(node, len(returned))))
        elif root not in number and steps is not None and isinstance(root.meta.get("val"), torch.Tensor):
            sources.append(Source(False, returned.setdefault(root, len(returned)), steps))
        else:
            sources.append(Source(False, returned.setdefault(_copy(gm, node), len(returned))))
    return list(returned), sources


def return_only(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Let a graph return these nodes, and compute no more than they need."""
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(nodes),)
    output.meta.pop("desc", None)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def spec_of(value: torch.Tensor, stride: Sequence[Any] | None = None) -> TensorSpec:
    """The metadata of a fake tensor, with other strides if they are given."""
    return TensorSpec(
        tuple(_torch.expression(s) for s in value.shape),
        tuple(_torch.expression(s) for s in (value.stride() if stride is None else stride)),
        value.dtype,
        value.device,
    )


def _copy(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """A copy of a value, for an output whose views cannot be made again outside."""
    value = node.meta["val"]
    with gm.graph.inserting_after(node):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    with value.fake_mode:
        copy.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return copy


def _chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node whose memory this one is in, and the views from there to it."""
    views: list[fx.Node] = []
    while (base := _base(node)) is not None:
        views.append(node)
        node = base
    return node, views[::-1]


def _base(node: fx.Node) -> fx.Node | None:
    """The node that a node is a view of, or ``None`` when its memory is its own."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0] if _declares_view(node.args[0]) else None
    if node.target in _UNDECLARED_VIEWS or _declares_view(node):
        return node.args[0]
    return None


def _declares_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target._schema.is_mutable:
        return False
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and any(r.alias_info is not None for r in target._schema.returns)


class _NotConstant(Exception):
    pass


def _steps(views: Sequence[fx.Node]) -> tuple[Step, ...] | None:
    """The views as operators on constants and symbols; ``None`` when one takes another tensor, or a storage offset."""
    steps = []

    def argument(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return _torch.expression(value)
        size = value.meta.get("val")
        if isinstance(size, (int, torch.SymInt)):
            return _torch.expression(size)
        raise _NotConstant

    try:
        for view in views:
            if view.target is torch.ops.aten.as_strided.default:
                return None  # it counts from the beginning of memory, where a real input need not begin
            rest = map_aggregate(tuple(view.args[1:]), argument)
            kwargs = map_aggregate(dict(view.kwargs), argument)
            steps.append(Step(view.target, (PREVIOUS, *rest), kwargs))  # type: ignore[arg-type, misc]
    except _NotConstant:
        return None
    return tuple(steps)
