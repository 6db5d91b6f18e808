"""Rules that push slices through an operator, from its result to its inputs, for ``hoist_slices``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpasses.graphs.rewriting import value_of
from fxpasses.passes._matching import RESHAPES, is_call, shape_of

aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., fx.Node]

_ALSO_POINTWISE = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}
_REDUCTIONS = (
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.var.correction,
)
"""Not a set: the order of ``_RULES`` is part of the digest of passes, the same in every process."""
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class Selection:
    """The elements from ``start`` up to ``end`` along one dimension."""

    dim: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def of(self, node: fx.Node, call: Call) -> fx.Node:
        """Slice the selected part of ``node``."""
        return call(aten.slice.Tensor, node, self.dim, self.start, self.end)


def select_inputs(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    """Apply ``node``'s operator to the parts of its inputs that the selected part of its result needs.

    Args:
        node: the node; all sizes must be integers.
        chosen: the part of its result.
        call: inserts a call.

    Returns:
        The new node, or None, before inserting anything, if the operator has no rule.
    """
    target = node.target
    if any(shape_of(n) is None for n in node.all_input_nodes):
        return None
    if target in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return _pointwise(node, chosen, call)
    rule = _RULES.get(target)
    return None if rule is None else rule(node, chosen, call)


def _pointwise(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    rank = value_of(node).dim()

    def part(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        dim = chosen.dim - (rank - value_of(argument).dim())
        if dim < 0 or value_of(argument).shape[dim] == 1:
            return argument  # broadcast
        return replace(chosen, dim=dim).of(argument, call)

    return call(node.target, *map(part, node.args), **{k: part(v) for k, v in node.kwargs.items()})


def _reduction(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    source, dims = node.args[:2]
    rank = value_of(source).dim()  # type: ignore[arg-type]
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    reduced = {d % rank for d in dims}
    keepdim = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    dim = chosen.dim if keepdim else [d for d in range(rank) if d not in reduced][chosen.dim]
    if dim in reduced:
        return None
    part = replace(chosen, dim=dim).of(source, call)  # type: ignore[arg-type]
    return call(node.target, part, *node.args[1:], **node.kwargs)


def _matmul(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    left, right = node.args[-2:]
    last = value_of(node).dim() - 1
    chosen_left, chosen_right = (chosen.dim < last, chosen.dim != last - 1)
    bias: list[Any] = []
    if node.target is aten.addmm.default:
        shape = shape_of(node.args[0]) or ()
        dim = chosen.dim - (2 - len(shape))
        broadcast = dim < 0 or shape[dim] == 1
        bias = [node.args[0] if broadcast else replace(chosen, dim=dim).of(node.args[0], call)]  # type: ignore[arg-type]
    parts = [
        chosen.of(x, call) if wanted else x  # type: ignore[arg-type]
        for x, wanted in ((left, chosen_left), (right, chosen_right))
    ]
    return call(node.target, *bias, *parts, **node.kwargs)


def _permute(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    rank = value_of(node).dim()
    dims = [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    part = replace(chosen, dim=dims[chosen.dim]).of(node.args[0], call)  # type: ignore[arg-type]
    return call(node.target, part, node.args[1])


def _expand(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    source = node.args[0]
    shape = list(shape_of(node) or ())
    shape[chosen.dim] = chosen.size
    dim = chosen.dim - (len(shape) - value_of(source).dim())  # type: ignore[arg-type]
    if dim >= 0 and value_of(source).shape[dim] != 1:  # type: ignore[arg-type]
        source = replace(chosen, dim=dim).of(source, call)  # type: ignore[arg-type]
    return call(node.target, source, shape)


def _unsqueeze(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    new = node.args[1] % value_of(node).dim()  # type: ignore[operator]
    if chosen.dim == new:
        return None
    dim = chosen.dim - (chosen.dim > new)
    return call(node.target, replace(chosen, dim=dim).of(node.args[0], call), node.args[1])  # type: ignore[arg-type]


def _view(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    source, shape = node.args[0], list(shape_of(node) or ())
    before = shape_of(source)
    assert before is not None
    shape[chosen.dim] = chosen.size
    dim = kept_dimension(shape_of(node) or (), before, chosen.dim)
    if dim is not None:
        part = replace(chosen, dim=dim).of(source, call)  # type: ignore[arg-type]
        return reshape(part, shape, call)
    return _view_of_matmul(node, chosen, call)


def _view_of_matmul(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    """Handle ``view(mm(view(x, [b * t, k]), w), [b, t, n])``: a linear layer on more than two dimensions."""
    matmul, shape = node.args[0], shape_of(node) or ()
    if not is_call(matmul, aten.mm.default, aten.addmm.default) or len(matmul.users) != 1:
        return None
    left, right = matmul.args[-2:]
    rows, inner = shape_of(left) or (0, 0)
    outer = _leading(shape, rows)
    if outer is None or chosen.dim >= len(outer):
        return None
    if matmul.target is aten.addmm.default and len(shape_of(matmul.args[0]) or ()) != 1:
        return None
    whole = left.args[0] if is_call(left, *RESHAPES) else None  # type: ignore[union-attr]
    if shape_of(whole) != (*outer, inner):
        if not value_of(left).is_contiguous():  # type: ignore[arg-type]
            return None
        whole = call(aten.view.default, left, [*outer, inner])
    part = chosen.of(whole, call)  # type: ignore[arg-type]
    kept = list(shape)
    kept[chosen.dim] = chosen.size
    part = reshape(part, [math.prod(kept[: len(outer)]), inner], call)
    return call(node.target, call(matmul.target, *matmul.args[:-2], part, right), kept)


def _leading(shape: tuple[int, ...], rows: int) -> tuple[int, ...] | None:
    """Return the first dimensions of ``shape`` that together have ``rows`` elements."""
    for count in range(1, len(shape) + 1):
        if math.prod(shape[:count]) == rows:
            return shape[:count]
    return None


def reshape(node: fx.Node, shape: list[int], call: Call) -> fx.Node:
    """Return a view of a node, or of a copy of it if its strides do not allow a view.

    Args:
        node: the node.
        shape: the sizes of the view.
        call: inserts a call.
    """
    value = value_of(node)
    try:
        with value.fake_mode:
            # Fake tensors accept some views across dimensions of size one that tensors do not.
            value.squeeze().view(shape)
    except (RuntimeError, ValueError):
        node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return call(aten.view.default, node, shape)


def kept_dimension(shape: tuple[int, ...], other: tuple[int, ...], dim: int) -> int | None:
    """Return the dimension after a reshape that equals a dimension before it, or None.

    Args:
        shape: the sizes before.
        other: the sizes after.
        dim: the dimension of ``shape``.
    """
    for candidate in range(len(other)):
        if other[candidate] == shape[dim] and math.prod(other[:candidate]) == math.prod(shape[:dim]):
            return candidate
    return None


def _concatenation(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    rank = value_of(node).dim()
    along = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank  # type: ignore[operator]
    parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    if along == chosen.dim or any(value_of(p).dim() != rank for p in parts):
        return None
    return call(node.target, [chosen.of(p, call) for p in parts], along)


def _gather(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    """Handle ``gather`` and ``scatter`` along a dimension other than the selected one."""
    arguments: list[Any] = list(node.args)
    source, dim, index, *rest = arguments
    rank = value_of(node).dim()
    tensors = [a for a in (source, index, *rest) if isinstance(a, fx.Node)]
    size = value_of(node).shape[chosen.dim]
    if dim % rank == chosen.dim or any(value_of(t).shape[chosen.dim] != size for t in tensors):
        return None
    given: list[Any] = [source, index, *rest]
    parts: list[Any] = [chosen.of(a, call) if isinstance(a, fx.Node) else a for a in given]
    parts.insert(1, dim)
    return call(node.target, *parts, **node.kwargs)


def _full(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    shape = list(shape_of(node) or ())
    shape[chosen.dim] = chosen.size
    return call(node.target, shape, *node.args[1:], **node.kwargs)


def _squeeze(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    before = shape_of(node.args[0]) or ()
    dim = int(node.args[1]) % len(before)  # type: ignore[arg-type]
    if before[dim] != 1:
        return None
    part = replace(chosen, dim=chosen.dim + (chosen.dim >= dim)).of(node.args[0], call)  # type: ignore[arg-type]
    return call(node.target, part, dim)


def _attention(node: fx.Node, chosen: Selection, call: Call) -> fx.Node | None:
    """Select queries, which are independent. Under a causal mask the last one sees everything."""
    given: list[Any] = list(node.args)
    query, key, value, dropout, causal = given + [0.0, False][len(given) - 3 :]
    length = value_of(query).shape[2]
    mask = node.kwargs.get("attn_mask")
    if chosen.dim != 2 or any(user.args[1] != 0 for user in node.users if user.users):
        return None
    if causal and (chosen != Selection(2, length - 1, length) or value_of(key).shape[2] != length):
        return None
    kwargs = dict(node.kwargs)
    if isinstance(mask, fx.Node) and value_of(mask).dim() >= 2 and value_of(mask).shape[-2] != 1:
        kwargs["attn_mask"] = replace(chosen, dim=value_of(mask).dim() - 2).of(mask, call)
    return call(node.target, chosen.of(query, call), key, value, dropout, False, **kwargs)


_RULES: dict[Any, Callable[[fx.Node, Selection, Call], fx.Node | None]] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(RESHAPES, _view),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _matmul),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.cat.default: _concatenation,
    aten.gather.default: _gather,
    aten.scatter.value: _gather,
    aten.scatter.src: _gather,
    aten.full.default: _full,
    aten.squeeze.dim: _squeeze,
    _ATTENTION: _attention,
}
