"""Compute attention with fewer key heads than query heads without repeating keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import RESHAPES, calls_before, find_calls, is_call, replace_results, shape_of

aten = torch.ops.aten

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class RemoveRepeatKv(Pass):
    """Pass keys and values to attention unrepeated if they were repeated for groups of query heads.

    Models with grouped-query attention repeat each key head for the queries of its group. The repeated keys
    and values are copies of the whole cache, made for every generated token, and in training they are saved
    for the backward pass. The CPU attention kernel accepts the original heads.

    Before::

        k = aten.view(aten.clone(aten.expand(aten.unsqueeze(key, 2), [1, 4, 8, 2048, 64])), [1, 32, 2048, 64])
        v = ...
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        ...
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, ...)
        grad_key = aten.sum(aten.view(grads[1], [1, 4, 8, 2048, 64]), [2])

    After::

        out = aten._scaled_dot_product_flash_attention_for_cpu(q, key, value)
        ...
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, key, value, ...)
        grad_key = grads[1]

    The outputs and the gradient of the query stay bitwise equal. The gradients of keys and values are summed
    over a group inside the kernel: equal up to rounding.
    """

    name: ClassVar[str] = "remove_repeat_kv"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for node in find_calls(gm.graph, _FORWARD):
            query, key, value = node.args[:3]
            sources = [_repeated_from(x, query) for x in (key, value)]
            if sources[0] is None or sources[1] is None or shape_of(sources[0]) != shape_of(sources[1]):
                continue
            backwards = [
                u for u in find_calls(gm.graph, _BACKWARD) if list(u.args[1:4]) == [query, key, value]
            ]
            if not all(_sums_groups(backward) for backward in backwards) or not claim(node):
                continue
            new = calls_before(node, like=node)(_FORWARD, query, *sources, *node.args[3:], **node.kwargs)
            replace_results(node, new)
            for backward in backwards:
                _replace_backward(backward, sources)  # type: ignore[arg-type]
            changed = True
        return changed


def _repeated_from(node: object, query: object) -> fx.Node | None:
    """Return the ``[b, heads, t, width]`` that ``node`` repeats evenly for ``query``'s heads, or None."""
    shape, heads = shape_of(node), shape_of(query)
    if shape is None or heads is None or len(shape) != 4 or shape[1] != heads[1]:
        return None
    if not is_call(node, *RESHAPES):
        return None
    expand = node.args[0]
    if is_call(expand, aten.clone.default):
        expand = expand.args[0]
    if not is_call(expand, aten.expand.default):
        return None
    unsqueezed = expand.args[0]
    if not is_call(unsqueezed, aten.unsqueeze.default) or unsqueezed.args[1] not in (2, -3):
        return None
    source: Any = unsqueezed.args[0]
    kept, repeated = shape_of(source), shape_of(expand)
    if kept is None or repeated is None or len(kept) != 4:
        return None
    batch, key_heads, length, width = kept
    if repeated != (batch, key_heads, repeated[2], length, width) or repeated[2] < 2:
        return None
    if shape != (batch, key_heads * repeated[2], length, width) or value_of(source).stride(-1) != 1:
        return None
    return source  # type: ignore[return-value]


def _sums_groups(backward: fx.Node) -> bool:
    """Whether the only use of the gradients of keys and values is to sum them over each group."""
    gradients = [item for item in backward.users if item.args[1] in (1, 2)]
    return all(_group_sum(user) is not None for item in gradients for user in item.users)


def _group_sum(view: fx.Node) -> fx.Node | None:
    """Return the sum over dimension 2 of a view ``[b, heads, group, t, width]``, or None."""
    shape = shape_of(view)
    if not is_call(view, *RESHAPES) or shape is None or len(shape) != 5 or len(view.users) != 1:
        return None
    (total,) = view.users
    if not is_call(total, aten.sum.dim_IntList) or list(total.args[1]) != [2] or total.kwargs:  # type: ignore[arg-type]
        return None
    return total


def _replace_backward(backward: fx.Node, sources: list[fx.Node]) -> None:
    gradient, query = backward.args[:2]
    new = calls_before(backward)(_BACKWARD, gradient, query, *sources, *backward.args[4:], **backward.kwargs)
    for position, item in replace_results(backward, new).items():
        for view in list(item.users) if position else []:
            total = _group_sum(view)
            assert total is not None
            call = calls_before(total)
            keepdim = len(total.args) > 2 and total.args[2]
            whole = call(aten.unsqueeze.default, item, 2) if keepdim else item
            if not same_metadata(value_of(whole), value_of(total)):
                whole = call(aten.clone.default, whole, memory_format=torch.contiguous_format)
            replace(total, whole)
            view.graph.erase_node(view)
