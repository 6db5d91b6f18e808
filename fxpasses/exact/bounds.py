"""Integers at the ends of what a graph takes: what indexes a table is wrong first at the table's ends.

Nothing in a graph says that an input is an index. So the graph runs, on plain tensors, with one element of the input further and further
out, until it refuses. Candidates are the sizes that occur in it, on either side of zero.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxpasses._torch import OpOverload

__all__ = ["at_bounds"]

aten = torch.ops.aten

_CHECK_INDICES = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_add.default,
    aten.index_put.default,
    aten.index_select.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
}
"""Operators whose kernels refuse an index out of bounds, or mask it. Others (custom ones, those that take offsets) may read beyond their memory."""

_FAR = 1009
"""An integer that the graph takes this far out is no index."""


def at_bounds(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any] | None:
    """Returns inputs whose integers lie at the ends of what the graph takes, or next to them.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: example inputs, on which it runs.

    Returns:
        The inputs, or ``None`` where none is a tensor of integers that could be an index.
    """
    if any(n.op == "call_function" and not _is_pure(n.target) for n in gm.graph.nodes):
        return None  # collectives and custom operators are not called for a question about indices
    leaves = [leaf for node in gm.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    sizes = {size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape if type(size) is int}
    generator = torch.Generator().manual_seed(len(inputs))
    found, any_index = list(inputs), False
    for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = inputs[at]
        if not _is_integer(value) or not value.numel() or not _is_checked(node):
            continue
        low, high = _range(gm, found, at, sizes)
        if (low, high) == (int(value.min()), int(value.max())):
            continue
        any_index = True
        # The lowest alone may be what it is taken for: -5 and 0 are the same row of five.
        ends = torch.tensor([high, min(low + 1, high), low, int(value.view(-1)[0])])
        made = ends[torch.arange(value.numel()) % len(ends)].to(value.dtype)
        made = made[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        is_sorted = value.dim() == 1 and bool((value.diff() >= 0).all())
        found[at] = made.sort().values if is_sorted else made
    return found if any_index and _runs(gm, found) else None


def _is_integer(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _is_pure(target: Any) -> bool:
    return target is operator.getitem or (
        isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    )


def _is_checked(node: fx.Node) -> bool:
    """Whether what is computed from integers, up to what indexes with them, is elementwise, a view, or checks indices."""
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user in seen or user.op == "output" or user.target in _CHECK_INDICES:
                continue
            seen.add(user)
            if not isinstance(user.target, OpOverload):
                return False
            is_view = any(returned.alias_info is not None for returned in user.target._schema.returns)
            if torch.Tag.pointwise not in user.target.tags and not is_view:
                return False
            if _is_integer(user.meta.get("val")):
                queue.append(user)
    return True


def _range(gm: fx.GraphModule, inputs: Sequence[Any], at: int, sizes: set[int]) -> tuple[int, int]:
    """The smallest and the largest value that one input may hold."""
    low, high = int(inputs[at].min()), int(inputs[at].max())
    info = torch.iinfo(inputs[at].dtype)
    above = sorted({v for v in (*(s - 1 for s in sizes), _FAR) if high < v <= info.max})
    below = sorted({v for v in (*(-s for s in sizes), -1, -_FAR) if info.min <= v < low}, reverse=True)

    def runs(extreme: int) -> bool:
        given = list(inputs)
        given[at] = given[at].clone()
        given[at].view(-1)[-1:] = extreme
        return _runs(gm, given)

    # Whoever refuses a value refuses those further out.
    high = [high, *above][bisect.bisect_left(above, True, key=lambda v: not runs(v))]
    low = [low, *below][bisect.bisect_left(below, True, key=lambda v: not runs(v))]
    return low, high


def _runs(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    given = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            fx.Interpreter(gm).run(*given, enable_io_processing=False)
    except (RuntimeError, IndexError, ValueError):
        return False
    return True
