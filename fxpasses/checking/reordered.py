"""Sums in another order, which a right rewrite may use, and the error that this brings to one element.

A matmul, which sums many products, rounds once, at the end, or nearly so. A rewrite that makes the sum in parts rounds each part, and
a part may be many times as large as the sum: a sum that is exact by luck, or zero, is off by half a unit in the last place of its largest
part (N. J. Higham, "The accuracy of floating point summation", 1993: the error of any order is bounded by the partial sums that it makes).
So the size of the parts decides what rounding may do to one element, and it is measured: the sum is made in a few parts.

A scatter that accumulates (the gradient of an embedding) is a sum for each element that it writes to: of the updates that hit this element, in
the order of the list, which may be any. What is there before is no part. It is not rounded, and a partial sum with it is what the result and the other
part differ by: one of these two is at least half as large. A scatter adds one update at a time and rounds each time: its error is a walk of as many
steps as there are updates, as long as the root of their number in the mean (Higham, the same place: statistical bounds). What is added to such a sum
afterwards is one more term, which another order may begin with; and two sums that are added are one sum to a rewrite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses._torch import OpOverload

__all__ = ["Parts", "only_moves_elements", "parts", "parts_behind", "parts_of_call"]

aten = torch.ops.aten
_PARTS = 8
"""In how many parts a sum is made: what lies in front of each seam, and behind it, is looked at."""

_ADDITIONS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ARRANGING = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.neg.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_NO_PADDING = -1
"""The padding index of an embedding without padding."""


@dataclass(frozen=True)
class Parts:
    """The partial sums behind each element of a sum.

    Attributes:
        largest: the largest partial sum behind each element, in float64; zero where nothing is summed.
        terms: how many terms each element has.
        in_turn: whether the operator itself adds one term at a time.
    """

    largest: Tensor
    terms: Tensor
    in_turn: bool

    def walk(self, dtype: torch.dtype, any_order: bool) -> Tensor:
        """By how many units of the largest part another order moves each element.

        In low precision, matmuls and sums are accumulated in a higher one and rounded once: their order changes nothing. Only parts that
        are rounded each do.

        Args:
            dtype: of the result.
            any_order: whether the sum may be made in any way, also one term at a time, and in parts that are rounded each, and not
                just in another order of a few parts.
        """
        few = dtype in _LOW_PRECISION
        if self.in_turn or (any_order and not few):
            return self.terms.sqrt()
        return torch.ones_like(self.terms) if any_order or not few else torch.zeros_like(self.terms)

    def arranged(self, target: Any, args: Sequence[Any], kwargs: Any) -> Parts | None:
        """Send the parts through an operator that only moves elements, or changes their sign.

        Args:
            target: the operator.
            args: its arguments, the tensor of these parts first.
            kwargs: its keyword arguments.

        Returns:
            The parts of its result; ``None`` for other operators.
        """
        if target not in _ARRANGING:
            return None
        if target is aten.neg.default:
            return self
        largest, terms = (target(each, *args[1:], **kwargs) for each in (self.largest, self.terms))
        return Parts(largest, terms, self.in_turn)


def parts(target: Any, args: Sequence[Any], kwargs: Any) -> Parts | None:
    """The partial sums behind each element of a sum, a product or an accumulating scatter; ``None`` for other operators.

    An element that a scatter hits once at most is no sum.

    Args:
        target: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    >>> a, b = torch.tensor([[8.0, -7.0]]), torch.tensor([[1.0], [1.0]])
    >>> parts(torch.ops.aten.mm.default, (a, b), {}).largest
    tensor([[8.]], dtype=torch.float64)
    """
    cut = _CUTS.get(target)
    summed = cut(args, kwargs) if cut is not None else None
    if summed is None:
        return None
    size = summed.size
    bounds = sorted({size * k // min(_PARTS, size) for k in range(min(_PARTS, size) + 1)})
    partial_sums = [summed.made(start, stop) for start, stop in itertools.pairwise(bounds)]
    total = torch.stack(partial_sums).sum(0)
    front = torch.zeros_like(total)
    largest = total.abs()
    for partial in partial_sums:
        front = front + partial
        largest = torch.maximum(largest, torch.maximum(front.abs(), (total - front).abs()))
    if isinstance(summed.terms, Tensor):
        return Parts(largest, summed.terms, in_turn=True)
    return Parts(largest, torch.full_like(largest, summed.terms), in_turn=False)


def parts_of_call(
    target: Any, args: Sequence[Any], kwargs: Any, sums: Sequence[Parts | None], result: Any
) -> Parts | None:
    """The same, for additions and arrangements of sums, too.

    Args:
        target: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        sums: the parts of the first two arguments, where they are sums.
        result: what the call gives.

    >>> one = parts(torch.ops.aten.sum.default, (torch.tensor([8.0, -7.0]),), {})
    >>> two = parts(torch.ops.aten.sum.default, (torch.tensor([6.0, -5.0]),), {})
    >>> values = torch.tensor(1.0), torch.tensor(1.0)
    >>> parts_of_call(torch.ops.aten.sub.Tensor, values, {}, (one, two), torch.tensor(0.0)).largest
    tensor(8., dtype=torch.float64)
    """
    found = parts(target, args, kwargs)
    if found is None and sums and sums[0] is not None:
        found = sums[0].arranged(target, args, kwargs)
    return _added(target, args, kwargs, sums, result) if found is None else found


def only_moves_elements(target: Any) -> bool:
    """Whether an operator only arranges elements anew, or changes their sign: it rounds nothing."""
    return target in _ARRANGING


def parts_behind(
    node: fx.Node, values: Mapping[str, Any], known: dict[fx.Node, Parts | None]
) -> Parts | None:
    """The parts of a value that was made before, as far back as sums were added up.

    Args:
        node: what made it.
        values: the values of all nodes of the graph, by name.
        known: the parts of nodes that were asked for before; added to.
    """
    pending = [(node, False)]
    while pending:
        current, has_operands = pending.pop()
        if current in known:
            continue
        operands = [a for a in current.args[:2] if isinstance(a, fx.Node)]
        if current.op != "call_function":
            known[current] = None
        elif current.target in _ADDITIONS | _ARRANGING and not has_operands:
            pending += [(current, True), *((operand, False) for operand in operands)]
        else:
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), lambda n: values[n.name])
            sums = [known.get(a) if isinstance(a, fx.Node) else None for a in current.args[:2]]
            known[current] = parts_of_call(current.target, args, kwargs, sums, values[current.name])
    return known[node]


def _added(
    target: Any, args: Sequence[Any], kwargs: Any, sums: Sequence[Parts | None], result: Any
) -> Parts | None:
    """The parts of what two values add up to, one of them a sum: a rewrite may begin with any part, and make one sum of both."""
    if target not in _ADDITIONS or len(sums) < 2 or sums[0] is sums[1] is None:
        return None
    factors = 1.0, abs(kwargs.get("alpha", 1))
    largest, terms = (
        result.double().abs(),
        torch.zeros(result.shape, dtype=torch.float64, device=result.device),
    )
    summed = torch.zeros_like(result, dtype=torch.bool)
    for value, parts_of_it, factor in zip(args, sums, factors, strict=False):
        if parts_of_it is not None and parts_of_it.largest.shape != result.shape:
            return None
        size = value.double().abs() if isinstance(value, Tensor) else torch.tensor(abs(value)).double()
        largest = torch.maximum(largest, size * factor)
        if parts_of_it is None:
            terms = terms + 1
        else:
            largest = torch.maximum(largest, parts_of_it.largest * factor)
            terms = terms + parts_of_it.terms
            summed |= parts_of_it.largest > 0
    in_turn = any(each is not None and each.in_turn for each in sums)
    return Parts(torch.where(summed, largest, 0.0), terms, in_turn)


@dataclass(frozen=True)
class Cut:
    """The parts that a sum is cut into.

    Attributes:
        made: makes a part, from a first to a last index of what is summed.
        size: how many indices there are.
        terms: how many terms each element has: a tensor for an operator that adds one at a time.
    """

    made: Callable[[int, int], Tensor]
    size: int
    terms: Tensor | int


def _product(first: int) -> Callable[[Sequence[Any], Any], Cut | None]:
    def cut(args: Sequence[Any], kwargs: Any) -> Cut | None:
        a, b = (v.double() for v in args[first : first + 2])
        return Cut(lambda i, j: a[..., i:j] @ b[..., i:j, :], a.shape[-1], a.shape[-1])

    return cut


def _sum(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x: Tensor = args[0]
    dims = args[1] if len(args) > 1 else None
    keep = len(args) > 2 and bool(args[2])
    summed = [d % x.dim() for d in dims] if dims else list(range(x.dim()))
    if not summed or not x.is_floating_point() or not x.numel():
        return None
    longest = max(summed, key=lambda d: x.shape[d])
    wide = x.double()
    terms = torch.Size(x.shape[d] for d in summed).numel()
    return Cut(lambda i, j: wide.narrow(longest, i, j - i).sum(summed, keep), x.shape[longest], terms)


def _mean(args: Sequence[Any], kwargs: Any) -> Cut | None:
    summed = _sum(args, kwargs)
    if summed is None:
        return None
    return Cut(lambda i, j: summed.made(i, j) / summed.terms, summed.size, summed.terms)


def _convolution(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, weight, _, *how = args
    transposed, groups = how[3], how[5]
    if transposed or groups != 1:
        return None
    x, weight = x.double(), weight.double()
    operator: OpOverload = aten.convolution.default
    terms = weight[0].numel()
    return Cut(lambda i, j: operator(x[:, i:j], weight[:, i:j], None, *how), weight.shape[1], terms)


def _scatter(shape: Sequence[int], where: Tensor, updates: Tensor, taken: Tensor | None = None) -> Cut | None:
    """The updates of each element, cut into parts of equal numbers of them.

    Args:
        shape: of the result.
        where: the element that each update is added to, as a position in the flattened result.
        updates: what is added; of the shape of ``where``, or broadcast to it.
        taken: flags, broadcast as well: the updates that count; all by default.
    """
    if not updates.is_floating_point():
        return None
    updates = updates.double().expand(where.shape).flatten()
    if taken is not None:
        taken = taken.expand(where.shape).flatten()
        updates, where = updates[taken], where.flatten()[taken]
    where, order = where.flatten().sort(stable=True)
    updates = updates[order]
    _, group, counts = torch.unique_consecutive(where, return_inverse=True, return_counts=True)
    rank = torch.arange(len(where), device=where.device) - (counts.cumsum(0) - counts)[group]
    part = rank * _PARTS // counts[group]
    part[counts[group] == 1] = _PARTS  # in none: one update is no sum

    def made(i: int, j: int) -> Tensor:
        here = (part >= i) & (part < j)
        return added(where[here], updates[here])

    def added(to: Tensor, values: Tensor) -> Tensor:
        zeros = torch.zeros(torch.Size(shape).numel(), dtype=torch.float64, device=updates.device)
        return zeros.index_add_(0, to, values).view(torch.Size(shape))

    return Cut(made, _PARTS, added(where, torch.ones_like(updates)))


def _positions(shape: Sequence[int], device: torch.device) -> Tensor:
    """The position of each element in the flattened tensor."""
    return torch.arange(torch.Size(shape).numel(), device=device).view(torch.Size(shape))


def _index_put(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, indices, values = args[:3]
    if not (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        return None
    return _scatter(x.shape, aten.index.Tensor(_positions(x.shape, x.device), indices), values)


def _masked_index_put(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, mask, indices, values = args
    # What the mask leaves out may lie outside of the tensor.
    inside = [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]
    return _scatter(x.shape, aten.index.Tensor(_positions(x.shape, x.device), inside), values, mask)


def _scatter_add(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, dim, index, source = args[:4]
    if not index.numel():
        return None
    updates = source[tuple(slice(n) for n in index.shape)]
    return _scatter(x.shape, _positions(x.shape, x.device).gather(dim, index), updates)


def _scatter_reduce(args: Sequence[Any], kwargs: Any) -> Cut | None:
    return _scatter_add(args, kwargs) if args[4] == "sum" else None


def _index_add(args: Sequence[Any], kwargs: Any) -> Cut | None:
    x, dim, index, source = args
    where = _positions(x.shape, x.device).index_select(dim, index)
    return _scatter(x.shape, where, source * kwargs.get("alpha", 1))


def _embedding_backward(args: Sequence[Any], kwargs: Any) -> Cut | None:
    gradient, indices, rows, padding, by_frequency = args
    updates = gradient.double()
    if by_frequency:
        updates = updates / torch.bincount(indices.flatten(), minlength=rows)[indices].unsqueeze(-1)
    shape = (rows, gradient.shape[-1])
    taken = (indices != padding).unsqueeze(-1) if padding != _NO_PADDING else None
    return _scatter(shape, _positions(shape, gradient.device)[indices], updates, taken)


_CUTS: dict[Any, Callable[[Sequence[Any], Any], Cut | None]] = {
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.convolution.default: _convolution,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._unsafe_masked_index_put_accumulate.default: _masked_index_put,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.embedding_dense_backward.default: _embedding_backward,
}
