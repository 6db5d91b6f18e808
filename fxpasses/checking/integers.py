"""The roles of integers in a graph: indices, numbers that are only calculated with, numbers that are compared with a constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.graphs.rewriting import value_of

__all__ = ["compared_constants", "free_numbers", "index_bounds", "may_be_negative"]

aten, prims = torch.ops.aten, torch.ops.prims

_SAME_INDEX = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.permute.default, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    aten.detach.default, aten.t.default, prims.convert_element_type.default, aten._to_copy.default,
}  # fmt: skip
_COUNTS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.cumsum.default,
    aten.amax.default,
    aten.amin.default,
    aten.cat.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
}
_DIVISIONS = ("div", "remainder", "fmod", "shift", "pow")
_FROM_THE_END = (aten.index.Tensor, aten.index_put.default)
_EQUALITIES = (aten.eq.Scalar, aten.ne.Scalar)


def free_numbers(gm: fx.GraphModule) -> set[str]:
    """Inputs of integers that are only calculated with, so that they may be any: none is an index, a size or a divisor.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda a, b, x: (a * 2 + 1, x[b]))(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), torch.ones(3))
    >>> sorted(free_numbers(gm))
    ['a_1']
    """
    return {node.name for node in gm.graph.find_nodes(op="placeholder") if _is_whole(node) and _is_free(node)}


def _is_whole(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _is_free(node: fx.Node) -> bool:
    pending, seen = [node], {node}
    while pending:
        number = pending.pop()
        for user in number.users:
            if user.op == "output":
                continue
            tags = getattr(user.target, "tags", ())
            if torch.Tag.pointwise not in tags and user.target not in _SAME_INDEX | _COUNTS:
                return False
            if any(word in str(user.target) for word in _DIVISIONS) and user.args[0] is not number:
                return False
            if _is_whole(user) and user not in seen:  # flags and floating results are no indices
                if value_of(user).dtype is not torch.bool:
                    pending.append(user)
                seen.add(user)
    return True


def index_bounds(gm: fx.GraphModule) -> dict[str, int]:
    """Bounds of the integer inputs that are only used as indices (or compared).

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda table, index: torch.nn.functional.embedding(index, table))(
    ...     torch.ones(7, 2), torch.zeros(3, dtype=torch.int64)
    ... )
    >>> index_bounds(gm)
    {'index_1': 7}
    """
    found: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool:
            bound = _bound(node)
            if bound:
                found[node.name] = bound
    return found


def may_be_negative(node: fx.Node) -> bool:
    """Whether every lookup with an input takes a negative index for one from the end.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x, i, j: (x[i], x.gather(0, j)))(torch.ones(3), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    >>> [n.name for n in gm.graph.find_nodes(op="placeholder") if may_be_negative(n)]
    ['i_1']
    """
    found = _lookups(node)
    return bool(found) and all(user.target in _FROM_THE_END for user, _ in found or ())


def _bound(node: fx.Node) -> int | None:
    """The smallest size of what is looked up with this value; ``None`` when it is used in another way."""
    return min((size for _, size in _lookups(node) or ()), default=None)


def _lookups(node: fx.Node) -> list[tuple[fx.Node, int]] | None:
    """The calls that look something up with this value, and in how many; ``None`` when it is used in another way."""
    found: list[tuple[fx.Node, int]] = []
    pending = [node]
    while pending:
        index = pending.pop()
        for user in index.users:
            args = list(user.args)
            if user.target in _SAME_INDEX or (user.target is aten.where.self and args[0] is not index):
                pending.append(user)
            elif user.op == "output" or _is_flag(user):
                continue  # a comparison with it
            elif (size := _looked_up(user, index)) is not None:
                found.append((user, size))
            else:
                return None
    return found


def _is_flag(user: fx.Node) -> bool:
    value = value_of(user)
    pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
    return pointwise and isinstance(value, Tensor) and value.dtype is torch.bool


def _looked_up(user: fx.Node, index: fx.Node) -> int | None:
    args: list[Any] = list(user.args)
    source = value_of(args[0]) if args and isinstance(args[0], fx.Node) else None
    size: Any = None
    if user.target is aten.embedding.default and args[1] is index and isinstance(source, Tensor):
        size = source.shape[0]
    elif user.target is aten.embedding_dense_backward.default and args[1] is index:
        size = args[2]
    elif user.target in (
        aten.gather.default,
        aten.index_select.default,
        aten.scatter.value,
        aten.scatter.src,
        aten.scatter_add.default,
        aten.index_copy.default,
        aten.index_add.default,
        aten.index_fill.int_Scalar,
    ):
        if args[2] is index and isinstance(source, Tensor) and source.dim():
            size = source.shape[args[1]]
    elif user.target in (
        aten.index.Tensor,
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_masked_index_put_accumulate.default,
    ):
        at = 2 if "masked" in str(user.target) else 1
        if isinstance(source, Tensor) and isinstance(args[at], (list, tuple)) and index in args[at]:
            size = min(source.shape[d] for d, i in enumerate(args[at]) if i is index)
    return size if isinstance(size, int) else None


def compared_constants(gm: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    """For inputs of integers: the constants that the graph tests them for, and that it can do with.

    An index may be a constant outside of what there is to look up (the label to ignore) where each look-up takes the index
    through a choice that depends on such a test.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def looked_up(x, index):
    ...     known = index != -100
    ...     return x.gather(1, torch.where(known, index, 0)), index == 2
    >>> compared_constants(make_fx(looked_up)(torch.ones(3, 4), torch.ones(3, 1, dtype=torch.int64)))
    {'index_1': (-100, 2)}
    """
    bounds, free = index_bounds(gm), free_numbers(gm)
    found: dict[str, tuple[int, ...]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if not _is_whole(node) or value_of(node).dtype is torch.bool:
            continue
        info = torch.iinfo(value_of(node).dtype)
        tested = dict.fromkeys(
            user.args[1]
            for same in _same_numbers(node)
            for user in same.users
            if user.target in _EQUALITIES and isinstance(user.args[1], int)
        )
        chosen = tuple(c for c in tested if info.min <= c <= info.max)
        if node.name in bounds:
            chosen = tuple(c for c in chosen if 0 <= c < bounds[node.name] or _is_guarded(node, c))
        if chosen and (node.name in bounds or node.name in free):
            found[node.name] = chosen
    return found


def _same_numbers(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what holds its numbers in another shape."""
    yield node
    for user in node.users:
        if user.target in _SAME_INDEX:
            yield from _same_numbers(user)


def _is_guarded(node: fx.Node, constant: int) -> bool:
    """Whether every lookup gets the integers through a selection that depends on a comparison with this constant."""
    same = list(_same_numbers(node))
    tests = {
        user for one in same for user in one.users if user.target in _EQUALITIES and user.args[1] == constant
    }
    for one in same:
        for user in one.users:
            chosen = user.target is aten.where.self and user.args[0] in tests
            if not (chosen or user in same or user.op == "output" or _is_flag(user)):
                return False
    return True
