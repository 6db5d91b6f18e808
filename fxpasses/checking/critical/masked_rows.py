"""Masked scores for inputs of a softmax or exponential: minus infinity in parts of rows, and in a whole row.

A model masks before what a pass was written for, so the graph in which it is checked may not show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.graphs.numbers import computable

aten = torch.ops.aten

_SCORE_CONSUMERS = {aten._softmax, aten._log_softmax, aten.exp, aten.exp2, aten.logsumexp}
_PASS_THROUGH_OPS = {
    *(aten.add, aten.sub, aten.mul, aten.div, aten.where, aten.masked_fill, aten.cat, aten.tril, aten.triu),
    *(aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.permute, aten.transpose, aten.t, aten.alias),
    *(aten.slice, aten.select, aten.squeeze, aten.unsqueeze, aten.clone, aten._to_copy),
    torch.ops.prims.convert_element_type,
}  # fmt: skip


def with_masked_rows(
    gm: fx.GraphModule, inputs: Sequence[Any], generator: torch.Generator
) -> list[Any] | None:
    """Return inputs with masked scores, a whole row if nothing in the graph becomes NaN then.

    Args:
        gm: the graph.
        inputs: of it; they are copied.
        generator: of random numbers.

    Returns:
        ``None`` if the graph takes no scores, or cannot handle masked ones.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    scores = [
        at
        for at, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.shape[-1] > 1
        if value.dtype.itemsize > 1 and value.is_contiguous() and value.numel() and _feeds_softmax(node)
    ]
    partly, wholly = cloned(inputs), cloned(inputs)
    for at in scores:
        shape = -1, inputs[at].shape[-1]
        hidden = torch.rand(inputs[at].view(shape).shape, generator=generator) < 0.3
        hidden[:, 0] = False
        for made, last in ((partly, False), (wholly, True)):
            hidden[-1] |= last
            made[at].view(shape).masked_fill_(hidden.to(made[at].device), -math.inf)
    return next((made for made in (wholly, partly) if scores and _is_nan_free(gm, made)), None)


def _is_nan_free(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether no call returns NaN."""
    run = ExactRun(gm, keep=True)
    if run.results(inputs) is None:
        return False
    floats = [
        v for v in tree_leaves(list(run.values.values())) if isinstance(v, Tensor) and v.is_floating_point()
    ]
    return not any(bool(computable(v).isnan().any()) for v in floats)


def _feeds_softmax(node: fx.Node) -> bool:
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            packet = getattr(user.target, "overloadpacket", None)
            if packet in _SCORE_CONSUMERS:
                return True
            if packet in _PASS_THROUGH_OPS and user not in seen:
                seen.add(user)
                queue.append(user)
    return False
