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
from fxpasses.exact.samples import is_mask, is_ordered, symbol_values, with_values
from fxpasses.graphs.numbers import computable

aten = torch.ops.aten

_CHECK_INDICES = {
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

_SAFE = {
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

_COUNT_FROM_ZERO = {"aten.index_add.default", "aten.index_copy.default", "aten.index_select.default"}
"""Operators that reject negative indices, and decompose to one that counts those from the end."""

_FAR = (4099, 2**20 + 3, 2**40 + 5)
"""An integer that the graph accepts this far out is not an index: it may be any.

If floats are computed from it, only the first is used, which no 16-bit float represents: further out, nothing
is left of them.
"""
_PARTS = 1 << 40
_LAST = torch.iinfo(torch.int64).max
_EQUALITIES = (aten.eq.Scalar, aten.ne.Scalar)
_COUNTED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MOST_COMPARED = 3


def at_bounds(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[list[Any]]:
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
    found, among, positions = list(inputs), list(inputs), list(inputs)
    for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = inputs[at]
        if not _is_integer(value) or not value.numel():
            continue
        uses = _Uses.of(gm, node, found)
        if uses is None or (uses.makes_floats and _are_flags(value)) or not uses.take(value):
            continue
        low, high = _range(uses, value, sizes)
        numbers, made = computable(value), value
        if (low, high) != (int(numbers.min()), int(numbers.max())):
            # The lowest alone may hide a fault: -5 and 0 are the same row of five.
            # Where products wrap, both ends may hide it. Hence a number in between.
            inside = low + (high - low) * int(torch.randint(_PARTS, (), generator=generator)) // _PARTS
            ends = torch.tensor([high, min(low + 1, high), low, int(value.flatten()[0]), inside])
            made = ends[torch.arange(value.numel()) % len(ends)].to(value.dtype)
            made = made[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        counted = torch.randint(max(sizes, default=0) + 2, value.shape, generator=generator).to(value.dtype)
        compared = _with_compared(gm, uses, made, generator)
        for kept, tried in ((found, made), (among, compared), (positions, counted)):
            tried = tried.sort().values if is_ordered(value) else tried
            if not torch.equal(tried, value) and uses.take(tried):
                kept[at] = tried
    for kept, others in ((positions, inputs), (found, inputs), (among, found)):
        pairs = zip(kept, others, strict=True)
        if any(made is not given and not torch.equal(made, given) for made, given in pairs):
            yield kept


def at_counts(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[list[Any], str]]:
    """Yield inputs of which a graph counts none or one: what divides by the count may be clamped.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: example inputs, on which it runs.

    Returns:
        Inputs, and what they are: flags that are set nowhere or at one place; integers that all equal a
            number that the graph compares integers with (a label to ignore, a padding), or all but one.
    """
    generator = torch.Generator().manual_seed(len(inputs))
    for number in sorted({0, *_compared(gm)}, key=abs)[:_MOST_COMPARED]:
        nothing, one = list(inputs), list(inputs)
        for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            value = inputs[at]
            if _may_be(gm, node, inputs, value, number):
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


def takes(gm: fx.GraphModule, inputs: Sequence[Any], at: int, value: Tensor) -> bool:
    """Whether a graph accepts a value of integers, and reads no memory by them unchecked.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``.
        inputs: on which it runs.
        at: the index of the input in question.
        value: for it.
    """
    uses = _Uses.of(gm, gm.graph.find_nodes(op="placeholder")[at], inputs)
    return uses is not None and uses.take(value)


def _may_be(gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any], value: Any, number: int) -> bool:
    """Whether all elements of an input may be a number that it is compared with, and some are not."""
    if not isinstance(value, Tensor) or value.dtype not in _COUNTED or not value.is_contiguous():
        return False
    if (number < 0 and not value.dtype.is_signed) or bool((value == number).all()):
        return False
    if value.dtype is torch.bool or is_mask(value):
        return number == 0
    if is_ordered(value) or number not in _compared(gm):
        return False
    uses = _Uses.of(gm, node, inputs)
    return uses is not None and uses.take(torch.full_like(value, number))


def _compared(gm: fx.GraphModule) -> set[int]:
    return {n.args[1] for n in gm.graph.nodes if n.target in _EQUALITIES and type(n.args[1]) is int}


class _Uses:
    """What is computed from one integer input, up to what indexes with it.

    Of the rest of the graph, only integers are evaluated.

    Args:
        gm: the graph.
        node: the input.
        inputs: of the graph.
        wanted: the nodes to evaluate.
        sizes: the value of each symbol.

    Attributes:
        makes_floats: whether floats are computed from it other than by indexing.
    """

    def __init__(
        self, gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any], wanted: set[fx.Node], sizes: Any
    ) -> None:
        self._gm, self._node, self._inputs, self._wanted, self._sizes = gm, node, inputs, wanted, sizes
        calls = (n for n in wanted if n.op == "call_function" and n.target not in _CHECK_INDICES)
        self.makes_floats = any(_is_float(n.meta.get("val")) for n in calls)

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any]) -> _Uses | None:
        """Return the uses of an input; ``None`` if one does not check indices, or takes unknown sizes.

        Args:
            gm: the graph.
            node: the input.
            inputs: of the graph, in order.
        """
        below = _checked(node)
        if below is None:
            return None
        wanted, queue = set(below), list(below)
        while queue:
            for value in queue.pop().all_input_nodes:
                if value not in wanted and value is not node and _is_evaluated(value):
                    wanted.add(value)
                    queue.append(value)
        found = cls(gm, node, inputs, wanted, symbol_values(gm, inputs))
        try:
            edge = {v for n in wanted for v in n.all_input_nodes if v not in wanted and v is not node}
            for value in edge:
                found._blank(value)
        except (TypeError, AttributeError):  # not a tensor, or a data-dependent size
            return None
        return found

    def _blank(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise TypeError(node)
        return torch.zeros([with_values(size, self._sizes) for size in value.shape], dtype=value.dtype)

    def take(self, value: Tensor) -> bool:
        """Whether nothing rejects this value of the input."""
        env: dict[fx.Node, Any] = dict(
            zip(self._gm.graph.find_nodes(op="placeholder"), self._inputs, strict=True)
        )
        env[self._node] = value.clone()
        run = fx.Interpreter(self._gm)

        def known(node: fx.Node) -> Any:
            if node not in env:
                env[node] = self._blank(node)
            return env[node]

        try:
            with torch.no_grad(), torch.random.fork_rng():
                for node in self._gm.graph.nodes:
                    if node in self._wanted and node not in env:
                        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known)
                        is_strict = str(node.meta.get("original_aten")) in _COUNT_FROM_ZERO
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


def _with_compared(gm: fx.GraphModule, uses: _Uses, made: Tensor, generator: torch.Generator) -> Tensor:
    """Mix in the numbers that the graph compares integers with (a label to ignore), if it takes them.

    About half of the elements change. The first ones hold each pair of the numbers side by side, since two
    may matter only together; the others hold any.
    """
    taken = [number for number in sorted(_compared(gm)) if uses.take(torch.full_like(made, number))]
    if not taken:
        return made
    pairs = [
        n for i, first in enumerate(taken) for n in (first, *(x for y in taken[i + 1 :] for x in (first, y)))
    ]
    flat = torch.tensor(taken)[torch.randint(len(taken), (made.numel(),), generator=generator)].to(made.dtype)
    flat = torch.where(torch.rand(made.numel(), generator=generator) < 0.5, flat, made.flatten())
    first = min(len(pairs), made.numel() // 2)
    flat[:first] = torch.tensor(pairs[:first])
    given = flat.view(made.shape)
    return given if uses.take(given) else made


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


def _checked(node: fx.Node) -> set[fx.Node] | None:
    """Return what is computed from integers, up to what indexes with them or is a float.

    ``None`` if a call may index memory with them unchecked.
    """
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user.target is not operator.getitem and not _takes_any(user.target):
                return None
            if any(map(_is_integer, tree_leaves(user.meta.get("val")))):
                queue.append(user)
    return seen - {node}


def _takes_any(target: Any) -> bool:
    """Whether integers of any value are harmless: they are rejected, or do not index memory."""
    if not isinstance(target, OpOverload):
        return False
    is_view = any(returned.alias_info is not None for returned in target._schema.returns)
    by_element = not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(target.tags)
    return is_view or by_element or target in _CHECK_INDICES or target.overloadpacket in _SAFE


def _range(uses: _Uses, value: Tensor, sizes: set[int]) -> tuple[int, int]:
    """Return the smallest and the largest value that an input may hold."""
    numbers = computable(value)
    low, high = int(numbers.min()), int(numbers.max())
    info = torch.iinfo(value.dtype)
    far = _FAR[:1] if uses.makes_floats else (*_FAR, min(info.max, _LAST))
    above = sorted({v for v in (*(s - 1 for s in sizes), *far) if high < v <= info.max})
    below = sorted(
        {v for v in (*(-s for s in sizes), 0, -1, *(-f for f in far), -far[-1] - 1) if info.min <= v < low},
        reverse=True,
    )

    def takes(extreme: int) -> bool:
        return uses.take(torch.full_like(value, extreme))

    # What rejects a value rejects those further out. If an index is computed from several inputs, the end of
    # one is not a size.
    return _furthest([low, *below], takes), _furthest([high, *above], takes)


def _furthest(candidates: Sequence[int], takes: Callable[[int], bool]) -> int:
    """Return the integer furthest out that is accepted, from the first candidate, which is, to the last."""
    first = bisect.bisect_left(candidates, True, lo=1, key=lambda v: not takes(v))
    taken = candidates[first - 1]
    if first == len(candidates):
        return taken
    step = 1 if candidates[first] > taken else -1
    between = range(taken + step, candidates[first], step)
    if not between or not takes(between[0]):
        return taken
    return between[bisect.bisect_left(between, True, key=lambda v: not takes(v)) - 1]
