"""Calls that treat all features alike, for passes that move linear layers before them.

A *feature dimension* is the one along which a linear layer multiplies and sums. A call commutes with the layer
if it is linear and each of its results depends on inputs of the same feature, in the same way for all features:
gathers and slices of rows, interpolation, sums over rows, products with one factor per row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpasses.graphs.rewriting import value_of
from fxpasses.passes._matching import shape_of
from fxpasses.passes._rowwise import kept_dimension, reshape

aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class Features:
    """A tensor that has some of a layer's input features along one dimension.

    Attributes:
        node: the tensor.
        dim: the feature dimension.
        part: the first of the layer's input features, and the one after the last.
    """

    node: fx.Node
    dim: int
    part: tuple[int, int]

    @property
    def size(self) -> int:
        return self.part[1] - self.part[0]

    @property
    def rows(self) -> int:
        """The number of feature vectors."""
        return int(value_of(self.node).numel()) // self.size

    def of(self, node: Any, dim: int) -> Features | None:
        """Return the same features of another tensor; None if it has not as many, or another dtype."""
        shape = shape_of(node)
        if shape is None or not 0 <= dim < len(shape) or shape[dim] != self.size:
            return None
        same = value_of(node).dtype is value_of(self.node).dtype
        return Features(node, dim, self.part) if same else None


@dataclass(frozen=True)
class Step:
    """A call that commutes with the layer.

    Attributes:
        inputs: the features that it reads.
        rebuild: inserts the call for other features. Takes its inputs, their number of features, and a function
            that inserts calls.
        is_view: whether it computes nothing.
    """

    inputs: tuple[Features, ...]
    rebuild: Callable[[Sequence[fx.Node], int, Call], fx.Node]
    is_view: bool = False


def step_of(features: Features) -> Step | None:
    """Return the call that computes ``features`` if it commutes with a linear layer, else None."""
    node = features.node
    if node.op != "call_function" or any(shape_of(n) is None for n in (node, *node.all_input_nodes)):
        return None
    rule = _RULES.get(node.target)
    return None if rule is None else rule(features, node)


def _same_call(node: fx.Node, given: Features | None, *, is_view: bool = False) -> Step | None:
    """Return a step that repeats the call with another first argument."""
    if given is None:
        return None
    return Step(
        (given,), lambda made, _, call: call(node.target, made[0], *node.args[1:], **node.kwargs), is_view
    )


def _aligned(features: Features, node: Any) -> Features | None:
    """Return the features of an operand that is broadcast to ``features``."""
    shape = shape_of(node)
    return None if shape is None else features.of(node, features.dim - _rank(features.node) + len(shape))


def _rank(node: Any) -> int:
    return value_of(node).dim()


def _dim(node: fx.Node, position: int, rank: int) -> int:
    """Return a dimension among the arguments of ``node``, as a non-negative integer; 0 by default."""
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return given % rank  # type: ignore[no-any-return]


def _reshape(features: Features, node: fx.Node) -> Step | None:
    x, shape = node.args[0], shape_of(node) or ()
    dim = kept_dimension(shape, shape_of(x) or (), features.dim)
    given = None if dim is None else features.of(x, dim)

    def rebuild(made: Sequence[fx.Node], outputs: int, call: Call) -> fx.Node:
        return reshape(
            made[0], [outputs if d == features.dim else size for d, size in enumerate(shape)], call
        )

    return None if given is None else Step((given,), rebuild, is_view=True)


def _clone(features: Features, node: fx.Node) -> Step | None:
    given = features.of(node.args[0], features.dim)
    return None if given is None else Step((given,), lambda made, *_: made[0], is_view=True)


def _permute(features: Features, node: fx.Node) -> Step | None:
    dims: Any = node.args[1]
    given = features.of(node.args[0], dims[features.dim] % len(dims))
    return _same_call(node, given, is_view=True)


def _expand(features: Features, node: fx.Node) -> Step | None:
    given, shape = _aligned(features, node.args[0]), shape_of(node) or ()

    def rebuild(made: Sequence[fx.Node], outputs: int, call: Call) -> fx.Node:
        sizes = [outputs if d == features.dim else size for d, size in enumerate(shape)]
        return call(aten.expand.default, made[0], sizes)

    return None if given is None else Step((given,), rebuild, is_view=True)


def _repeat(features: Features, node: fx.Node) -> Step | None:
    repeats: Any = node.args[1]
    return _same_call(node, _aligned(features, node.args[0])) if repeats[features.dim] == 1 else None


def _slice(features: Features, node: fx.Node) -> Step | None:
    if _dim(node, 1, _rank(node)) == features.dim:
        return None
    return _same_call(node, features.of(node.args[0], features.dim), is_view=True)


def _select(features: Features, node: fx.Node) -> Step | None:
    removed = _dim(node, 1, _rank(node.args[0]))
    given = features.of(node.args[0], features.dim + (features.dim >= removed))
    return _same_call(node, given, is_view=True)


def _flip(features: Features, node: fx.Node) -> Step | None:
    dims: Any = node.args[1]
    if features.dim in dims:
        return None
    return _same_call(node, features.of(node.args[0], features.dim))


def _embedding(features: Features, node: fx.Node) -> Step | None:
    if features.dim != _rank(node) - 1:
        return None
    given = features.of(node.args[0], 1)
    indices = node.args[1]  # padding_idx and the like matter to gradients alone
    if given is None:
        return None
    return Step((given,), lambda made, _, call: call(aten.embedding.default, made[0], indices))


def _index(features: Features, node: fx.Node) -> Step | None:
    x: Any = node.args[0]
    indices: Any = node.args[1]
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if any(value_of(indices[d]).dtype in (torch.bool, torch.uint8) for d in indexed):
        return None  # as many dimensions as a mask has, and a size that depends on its values
    rank = max(_rank(indices[d]) for d in indexed)
    kept = [d for d in range(_rank(x)) if d not in indexed]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0  # where the dimensions of the indices go
    places: list[int | None] = [*kept[:first], *[None] * rank, *kept[first:]]
    dim = places[features.dim]
    return None if dim is None else _same_call(node, features.of(x, dim))


def _sum_of_terms(features: Features, node: fx.Node) -> Step | None:
    given = [_aligned(features, term) for term in node.args]
    if len(given) != 2 or given[0] is None or given[1] is None:
        return None
    return Step(
        (given[0], given[1]), lambda made, _, call: call(node.target, made[0], made[1], **node.kwargs)
    )


def _product(features: Features, node: fx.Node) -> Step | None:
    if node.kwargs or len(node.args) != 2:
        return None
    for position in (0,) if node.target is aten.div.Tensor else (0, 1):
        given, factor = _aligned(features, node.args[position]), node.args[1 - position]
        if given is not None and _is_same_for_all_features(features, factor):
            return Step((given,), functools.partial(_multiply, node, position))
    return None


def _multiply(node: fx.Node, position: int, made: Sequence[fx.Node], _: int, call: Call) -> fx.Node:
    args = list(node.args)
    args[position] = made[0]
    return call(node.target, *args)


def _is_same_for_all_features(features: Features, factor: Any) -> bool:
    if not isinstance(factor, fx.Node):
        return isinstance(factor, (int, float))
    shape = shape_of(factor)
    if shape is None:
        return False
    dim = features.dim - _rank(features.node) + len(shape)
    return dim < 0 or shape[dim] == 1


def _negation(features: Features, node: fx.Node) -> Step | None:
    return _same_call(node, features.of(node.args[0], features.dim))


def _reduction(features: Features, node: fx.Node) -> Step | None:
    x = node.args[0]
    dims: Any = node.args[1]
    if not dims or node.kwargs:
        return None
    removed = {dim % _rank(x) for dim in dims}
    keeps = len(node.args) > 2 and node.args[2]
    places = range(_rank(x)) if keeps else [d for d in range(_rank(x)) if d not in removed]
    dim = places[features.dim]
    return None if dim in removed else _same_call(node, features.of(x, dim))


def _cat(features: Features, node: fx.Node) -> Step | None:
    parts: Any = node.args[0]
    if any(_rank(part) != _rank(node) for part in parts):
        return None
    dim = _dim(node, 1, _rank(node))
    if dim == features.dim:
        return _cat_of_features(features, parts)
    given = [features.of(part, features.dim) for part in parts]
    if None in given:
        return None
    return Step(
        tuple(part for part in given if part is not None),
        lambda made, _, call: call(aten.cat.default, made, dim),
    )


def _cat_of_features(features: Features, parts: Sequence[fx.Node]) -> Step | None:
    """The layer is applied to each part with its part of the weight, and the results are added."""
    ends = itertools.accumulate(
        (value_of(part).shape[features.dim] for part in parts), initial=features.part[0]
    )
    given = [
        Features(part, features.dim, bounds)
        for part, bounds in zip(parts, itertools.pairwise(ends), strict=True)
    ]
    if any(f.size == 0 or value_of(f.node).dtype is not value_of(features.node).dtype for f in given):
        return None
    return Step(
        tuple(given), lambda made, _, call: functools.reduce(lambda a, b: call(aten.add.Tensor, a, b), made)
    )


def _pad(features: Features, node: fx.Node) -> Step | None:
    pads: Any = node.args[1]
    after = _rank(node) - 1 - features.dim  # pads are listed from the last dimension on
    if any(pads[2 * after : 2 * after + 2]) or (len(node.args) > 2 and node.args[2] != 0):
        return None
    return _same_call(node, features.of(node.args[0], features.dim))


def _pool(features: Features, node: fx.Node) -> Step | None:
    if features.dim != _rank(node) - 3:
        return None
    return _same_call(node, features.of(node.args[0], features.dim))


_Rule = Callable[[Features, fx.Node], Step | None]

_RULES: dict[Any, _Rule] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.clone.default: _clone,
    aten.alias.default: _clone,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    prims.rev.default: _flip,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.add.Tensor: _sum_of_terms,
    aten.sub.Tensor: _sum_of_terms,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _product,
    aten.neg.default: _negation,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.avg_pool2d.default: _pool,
}
