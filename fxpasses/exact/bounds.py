"""Integers at the ends of what a graph accepts, and those that it compares with a number.

Wrong indices into a table show first at its ends. Nothing in a graph says that an input is an index. So what
is computed from it runs on plain tensors, with all of its elements further and further out, until something
rejects them. Candidates are the sizes that occur in the graph, on either side of zero.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses._torch import OpOverload
from fxpasses.exact.samples import evaluate_size, is_mask, is_ordered, symbol_values
from fxpasses.graphs.numbers import computable

aten = torch.ops.aten

_INDEX_CHECKING_OPS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.index_select.default,
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
}
"""Operators whose kernels reject or mask an index out of bounds.

Others (custom ones, those that take offsets) may read beyond their memory.
"""

_NON_INDEXING_OPS = {
    *(aten.cat, aten.stack, aten.constant_pad_nd, aten.flip, aten.roll, aten.sort, aten.topk),
    *(aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.bucketize, aten.searchsorted),
    *(aten.mm, aten.bmm, aten.clone, aten.copy, aten._to_copy, aten.repeat, aten.tril, aten.triu),
    *(
        aten.slice_scatter,
        aten.select_scatter,
        aten.diagonal_scatter,
        aten.fill,
        aten.full_like,
        aten.zeros_like,
    ),
    *(aten.ones_like, aten.new_zeros, aten.new_ones, aten.new_full),
}
"""Operators that are neither elementwise nor reductions, and accept any integers without indexing memory."""

_NON_NEGATIVE_INDEX_OPS = {"aten.index_add.default", "aten.index_copy.default", "aten.index_select.default"}
"""Operators that reject negative indices, and decompose to one that counts those from the end."""

_FAR_INTEGERS = (4099, 2**20 + 3, 2**40 + 5)
"""An integer that the graph accepts this far out is not an index: it may be any.

If floats are computed from it, only the first is used, which no 16-bit float represents: further out, nothing
is left of them.
"""
_STEPS = 1 << 40
_INT64_MAX = torch.iinfo(torch.int64).max
_EQUALITY_OPS = (aten.eq.Scalar, aten.ne.Scalar)
_COUNTED_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MAX_COMPARED = 3


def inputs_at_bounds(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield inputs whose integers are at, or next to, the ends of what the graph accepts, or are positions.

    Some also hold the numbers that the graph compares integers with.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: example inputs, on which it runs.

    Returns:
        Inputs that differ from the examples: none if no input is a tensor of integers that could be an index.
            Positions are those of sizes that occur in the graph, such as a length that a mask is made of.
    """
    leaves = [leaf for node in gm.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    sizes = {size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape if type(size) is int}
    generator = torch.Generator().manual_seed(len(inputs))
    found, mixed, positions = list(inputs), list(inputs), list(inputs)
    for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = inputs[at]
        if not _is_integer(value) or not value.numel():
            continue
        uses = _Uses.of(gm, node, found)
        if uses is None or (uses.makes_floats and _are_flags(value)) or not uses.accepts(value):
            continue
        low, high = _accepted_range(uses, value, sizes)
        numbers, made = computable(value), value
        if (low, high) != (int(numbers.min()), int(numbers.max())):
            # The lowest alone may hide a fault: -5 and 0 are the same row of five.
            # Where products wrap, both ends may hide it. Hence a number in between.
            inside = low + (high - low) * int(torch.randint(_STEPS, (), generator=generator)) // _STEPS
            ends = torch.tensor([high, min(low + 1, high), low, int(value.flatten()[0]), inside])
            made = ends[torch.arange(value.numel()) % len(ends)].to(value.dtype)
            made = made[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        counted = torch.randint(max(sizes, default=0) + 2, value.shape, generator=generator).to(value.dtype)
        compared = _mix_in_compared(gm, uses, made, generator)
        for kept, tried in ((found, made), (mixed, compared), (positions, counted)):
            tried = tried.sort().values if is_ordered(value) else tried
            if not torch.equal(tried, value) and uses.accepts(tried):
                kept[at] = tried
    for kept, others in ((positions, inputs), (found, inputs), (mixed, found)):
        pairs = zip(kept, others, strict=True)
        if any(made is not given and not torch.equal(made, given) for made, given in pairs):
            yield kept


def inputs_with_rare_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[list[Any], str]]:
    """Yield inputs of which a graph counts none or one: what divides by the count may be clamped.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: example inputs, on which it runs.

    Returns:
        Inputs, and what they are: flags that are set nowhere or at one place; integers that all equal a
            number that the graph compares integers with (a label to ignore, a padding), or all but one.
    """
    generator = torch.Generator().manual_seed(len(inputs))
    for number in sorted({0, *_compared_numbers(gm)}, key=abs)[:_MAX_COMPARED]:
        nothing, one = list(inputs), list(inputs)
        for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            value = inputs[at]
            if _can_be_filled_with(gm, node, inputs, value, number):
                counted = value[value != number]
                draw = [
                    int(torch.randint(n, (1,), generator=generator)) for n in (value.numel(), len(counted))
                ]
                nothing[at] = torch.full_like(value, number)
                one[at] = nothing[at].clone()
                one[at].view(-1)[draw[0]] = counted[draw[1]]
        if any(made is not given for made, given in zip(nothing, inputs, strict=True)):
            yield nothing, f"integers or flags that are {number}"
            yield one, f"integers or flags that are {number}, but for one"


def accepts_input(gm: fx.GraphModule, inputs: Sequence[Any], at: int, value: Tensor) -> bool:
    """Whether a graph accepts a value of integers, and reads no memory by them unchecked.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: on which it runs.
        at: the index of the input in question.
        value: for it.
    """
    uses = _Uses.of(gm, gm.graph.find_nodes(op="placeholder")[at], inputs)
    return uses is not None and uses.accepts(value)


def _can_be_filled_with(
    gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any], value: Any, number: int
) -> bool:
    """Whether all elements of an input may be a number that it is compared with, and some are not."""
    if not isinstance(value, Tensor) or value.dtype not in _COUNTED_DTYPES or not value.is_contiguous():
        return False
    if (number < 0 and not value.dtype.is_signed) or bool((value == number).all()):
        return False
    if value.dtype is torch.bool or is_mask(value):
        return number == 0
    if is_ordered(value) or number not in _compared_numbers(gm):
        return False
    uses = _Uses.of(gm, node, inputs)
    return uses is not None and uses.accepts(torch.full_like(value, number))


def _compared_numbers(gm: fx.GraphModule) -> set[int]:
    return {n.args[1] for n in gm.graph.nodes if n.target in _EQUALITY_OPS and type(n.args[1]) is int}


class _Uses:
    """What is computed from one integer input, up to what indexes with it.

    Of the rest of the graph, only integers are evaluated.

    Args:
        gm: the graph.
        node: the input.
        inputs: of the graph.
        to_evaluate: the nodes to evaluate.
        sizes: the value of each symbol.

    Attributes:
        makes_floats: whether floats are computed from it other than by indexing.
    """

    def __init__(
        self, gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any], to_evaluate: set[fx.Node], sizes: Any
    ) -> None:
        self._gm, self._node, self._inputs, self._to_evaluate, self._sizes = (
            gm,
            node,
            inputs,
            to_evaluate,
            sizes,
        )
        calls = (n for n in to_evaluate if n.op == "call_function" and n.target not in _INDEX_CHECKING_OPS)
        self.makes_floats = any(_is_float(n.meta.get("val")) for n in calls)

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any]) -> _Uses | None:
        """Return the uses of an input; ``None`` if one does not check indices, or takes unknown sizes.

        Args:
            gm: the graph.
            node: the input.
            inputs: of the graph, in order.
        """
        dependents = _dependent_nodes(node)
        if dependents is None:
            return None
        to_evaluate, queue = set(dependents), list(dependents)
        while queue:
            for value in queue.pop().all_input_nodes:
                if value not in to_evaluate and value is not node and _is_evaluated(value):
                    to_evaluate.add(value)
                    queue.append(value)
        found = cls(gm, node, inputs, to_evaluate, symbol_values(gm, inputs))
        try:
            boundary = {
                v for n in to_evaluate for v in n.all_input_nodes if v not in to_evaluate and v is not node
            }
            for value in boundary:
                found._zeros_for(value)
        except (TypeError, AttributeError):  # not a tensor, or a data-dependent size
            return None
        return found

    def _zeros_for(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise TypeError(node)
        return torch.zeros([evaluate_size(size, self._sizes) for size in value.shape], dtype=value.dtype)

    def accepts(self, value: Tensor) -> bool:
        """Whether nothing rejects this value of the input."""
        env: dict[fx.Node, Any] = dict(
            zip(self._gm.graph.find_nodes(op="placeholder"), self._inputs, strict=True)
        )
        env[self._node] = value.clone()
        run = fx.Interpreter(self._gm)

        def value_of(node: fx.Node) -> Any:
            if node not in env:
                env[node] = self._zeros_for(node)
            return env[node]

        try:
            with torch.no_grad(), torch.random.fork_rng():
                for node in self._gm.graph.nodes:
                    if node in self._to_evaluate and node not in env:
                        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
                        is_strict = str(node.meta.get("original_aten")) in _NON_NEGATIVE_INDEX_OPS
                        if is_strict and any(_has_negative(env[given]) for given in node.all_input_nodes):
                            return False
                        env[node] = getattr(run, node.op)(node.target, args, kwargs)
        except (RuntimeError, IndexError, ValueError):
            return False
        return True


def _has_negative(value: Any) -> bool:
    return _is_integer(value) and bool((computable(value) < 0).any())


def _is_evaluated(node: fx.Node) -> bool:
    """Whether an operand is evaluated: integers, sizes and containers are, floats are blank."""
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return True
    if node.op == "call_function" and not _is_pure(node.target):
        return False  # do not call collectives and custom operators to learn about indices
    return node.op in ("placeholder", "get_attr") or not _is_float(value)


def _mix_in_compared(gm: fx.GraphModule, uses: _Uses, made: Tensor, generator: torch.Generator) -> Tensor:
    """Mix in the numbers that the graph compares integers with (a label to ignore), if it takes them.

    About half of the elements change. The first ones hold each pair of the numbers side by side, since two
    may matter only together; the others hold any.
    """
    accepted = [
        number for number in sorted(_compared_numbers(gm)) if uses.accepts(torch.full_like(made, number))
    ]
    if not accepted:
        return made
    pairs = [
        n
        for i, first in enumerate(accepted)
        for n in (first, *(x for y in accepted[i + 1 :] for x in (first, y)))
    ]
    flat = torch.tensor(accepted)[torch.randint(len(accepted), (made.numel(),), generator=generator)].to(
        made.dtype
    )
    flat = torch.where(torch.rand(made.numel(), generator=generator) < 0.5, flat, made.flatten())
    first = min(len(pairs), made.numel() // 2)
    flat[:first] = torch.tensor(pairs[:first])
    given = flat.view(made.shape)
    return given if uses.accepts(given) else made


def _is_integer(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _are_flags(value: Tensor) -> bool:
    """Whether a formula may take them for truth values: a mask, weights of examples."""
    return bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any())


def _is_pure(target: Any) -> bool:
    return target is operator.getitem or (
        isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    )


def _dependent_nodes(node: fx.Node) -> set[fx.Node] | None:
    """Return what is computed from integers, up to what indexes with them or is a float.

    ``None`` if a call may index memory with them unchecked.
    """
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user.target is not operator.getitem and not _accepts_any_integer(user.target):
                return None
            if any(map(_is_integer, tree_leaves(user.meta.get("val")))):
                queue.append(user)
    return seen - {node}


def _accepts_any_integer(target: Any) -> bool:
    """Whether integers of any value are harmless: they are rejected, or do not index memory."""
    if not isinstance(target, OpOverload):
        return False
    is_view = any(returned.alias_info is not None for returned in target._schema.returns)
    is_elementwise = not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(target.tags)
    return (
        is_view
        or is_elementwise
        or target in _INDEX_CHECKING_OPS
        or target.overloadpacket in _NON_INDEXING_OPS
    )


def _accepted_range(uses: _Uses, value: Tensor, sizes: set[int]) -> tuple[int, int]:
    """Return the smallest and the largest value that an input may hold."""
    numbers = computable(value)
    low, high = int(numbers.min()), int(numbers.max())
    info = torch.iinfo(value.dtype)
    far = _FAR_INTEGERS[:1] if uses.makes_floats else (*_FAR_INTEGERS, min(info.max, _INT64_MAX))
    above = sorted({v for v in (*(s - 1 for s in sizes), *far) if high < v <= info.max})
    below = sorted(
        {v for v in (*(-s for s in sizes), 0, -1, *(-f for f in far), -far[-1] - 1) if info.min <= v < low},
        reverse=True,
    )

    def accepts(extreme: int) -> bool:
        return uses.accepts(torch.full_like(value, extreme))

    # What rejects a value rejects those further out. If an index is computed from several inputs, the end of
    # one is not a size.
    return _furthest_accepted([low, *below], accepts), _furthest_accepted([high, *above], accepts)


def _furthest_accepted(candidates: Sequence[int], accepts: Callable[[int], bool]) -> int:
    """Return the integer furthest out that is accepted, from the first candidate, which is, to the last."""
    first = bisect.bisect_left(candidates, True, lo=1, key=lambda v: not accepts(v))
    accepted = candidates[first - 1]
    if first == len(candidates):
        return accepted
    step = 1 if candidates[first] > accepted else -1
    between = range(accepted + step, candidates[first], step)
    if not between or not accepts(between[0]):
        return accepted
    return between[bisect.bisect_left(between, True, key=lambda v: not accepts(v)) - 1]
