"""Give a functional ATen graph outputs that share no memory, and recipes for the original outputs."""

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
"""Operators that return a view although their schema does not say so."""


def separate_aliases(gm: fx.GraphModule, outputs: Sequence[Any]) -> tuple[list[fx.Node], list[Source | None]]:
    """Choose outputs that share no memory, and the views that make the wanted outputs from them.

    Args:
        gm: a graph without mutation.
        outputs: the wanted nodes, each a tensor or ``None``, in order.

    Returns:
        The nodes to return, in order of first use, and the source of each wanted output. An output that is (a
        view of) an input has that placeholder as source, numbered among the graph's tensor placeholders.
    """
    tensors = [
        n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    number = {node: i for i, node in enumerate(tensors)}
    chains = [_base_and_views(node) if isinstance(node, fx.Node) else None for node in outputs]
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
        steps = _view_steps(views)
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
    """Make a graph return these nodes, and remove what they do not need."""
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(nodes),)
    output.meta.pop("desc", None)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def spec_of(value: torch.Tensor, stride: Sequence[Any] | None = None) -> TensorSpec:
    """Return the metadata of a fake tensor, with ``stride`` instead of its own strides if given."""
    return TensorSpec(
        tuple(_torch.expression(s) for s in value.shape),
        tuple(_torch.expression(s) for s in (value.stride() if stride is None else stride)),
        value.dtype,
        value.device,
    )


def _copy(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Clone a value, for an output whose views cannot be replayed outside."""
    value = node.meta["val"]
    with gm.graph.inserting_after(node):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    with value.fake_mode:
        copy.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return copy


def _base_and_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node that owns this node's memory, and the views from there to this node."""
    views: list[fx.Node] = []
    while (base := _view_base(node)) is not None:
        views.append(node)
        node = base
    return node, views[::-1]


def _view_base(node: fx.Node) -> fx.Node | None:
    """Return the node that this one is a view of, or ``None`` if it owns its memory."""
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


def _view_steps(views: Sequence[fx.Node]) -> tuple[Step, ...] | None:
    """Return views with constant or symbolic arguments; ``None`` if one takes another tensor or an offset."""
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
                return None  # it counts from the start of the storage, where a real input need not start
            rest = map_aggregate(tuple(view.args[1:]), argument)
            kwargs = map_aggregate(dict(view.kwargs), argument)
            steps.append(Step(view.target, (PREVIOUS, *rest), kwargs))  # type: ignore[arg-type, misc]
    except _NotConstant:
        return None
    return tuple(steps)
