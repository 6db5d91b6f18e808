"""Made-up inputs of the sizes of real ones, for mistakes that real values hide.

In a model that has just been made, all norms have the weight one and the bias zero, activations are small, and a batch of tokens leaves
most of a vocabulary out. So a rewrite is tried on other values, too:

* every floating value moved at random, and indices drawn from all that the graph can look up
* values many times as large, with the other sign
* with NaN and infinities in places, for a pass that promises the same bits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import cloned
from fxpasses.rewriting import value_of

__all__ = ["index_bounds", "variants"]

aten, prims = torch.ops.aten, torch.ops.prims

_FACTORS = ((32.0, False), (32.0, True), (4.0, True))
"""How much larger values become, and whether tensors of positive values stay positive: each is tried where the one before
leads to NaN or infinities (the root of a variance, an overflow)."""

_BROKEN = (0.0, 0.25)
"""Which share of a tensor's elements is not finite, for each of NaN and the two infinities: in few places (one each) what is
computed between them stays to be seen, in many each row has one."""

_SAME_INDEX = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.permute.default, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    aten.detach.default, aten.t.default, prims.convert_element_type.default, aten._to_copy.default,
}  # fmt: skip
_COMPARISONS = {
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.lt.Scalar,
    aten.ge.Scalar,
}


def variants(
    gm: fx.GraphModule, given: Sequence[Any], bitwise: bool, generator: torch.Generator
) -> Iterator[list[tuple[list[Any], str]]]:
    """Other values for the first inputs of a graph: for each variant, what to try in turn until the graph stays finite.

    Args:
        gm: the graph.
        given: real inputs.
        bitwise: whether NaN and infinities are tried, too.
        generator: of the random numbers.

    Raises:
        Unsupported: for an input that cannot be copied.
    """
    bounds = index_bounds(gm)
    nodes = gm.graph.find_nodes(op="placeholder")

    def made(change: Any) -> list[Any]:
        values = cloned(given)
        with torch.no_grad():
            for node, value in zip(nodes, values, strict=False):
                if not isinstance(value, Tensor) or not value.numel() or _overlaps_itself(value):
                    continue
                if value.is_floating_point():
                    # Positive values may have to stay so (a variance), infinite ones are masks.
                    value.copy_(torch.where(value.isfinite(), change(value), value))
                elif node.name in bounds:
                    drawn = torch.randint(bounds[node.name], value.shape, generator=generator)
                    drawn.view(-1)[0] = bounds[node.name] - 1  # the last one, in any case
                    value.copy_(drawn)
        return values

    def moved(value: Tensor) -> Tensor:
        noise, other = (torch.randn(value.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        scale = (1 + 0.5 * noise).abs() * value.double()
        spread = 0.1 * other.to(value.device)
        return scale + (spread.abs() if _is_positive(value) else spread)

    def enlarged(factor: float, keep_positive: bool) -> Any:
        return lambda value: value * (factor if keep_positive and _is_positive(value) else -factor)

    def broken(share: float) -> Any:
        def change(value: Tensor) -> Tensor:
            value = value.clone(memory_format=torch.contiguous_format)
            flat = value.view(-1)
            count = max(1, int(share * flat.numel()))
            for bad in (float("nan"), float("inf"), float("-inf")):
                flat[torch.randint(flat.numel(), (count,), generator=generator)] = bad
            return value

        return change

    yield [(made(moved), "other values")]
    yield [
        (made(enlarged(*choice)), f"values {choice[0]:g} times as large, signs reversed")
        for choice in _FACTORS
    ]
    for share in _BROKEN if bitwise else ():
        yield [(made(broken(share)), "NaN and infinities in places")]


def index_bounds(gm: fx.GraphModule) -> dict[str, int]:
    """For inputs of whole numbers that are only used to look something up (or compared): how much there is to look up.

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


def _bound(node: fx.Node) -> int | None:
    """The smallest size of what is looked up with this value; ``None`` when it is used in another way."""
    bounds: list[int] = []
    pending = [node]
    while pending:
        index = pending.pop()
        for user in index.users:
            args = list(user.args)
            if user.target in _SAME_INDEX or (user.target is aten.where.self and args[0] is not index):
                pending.append(user)
            elif user.target in _COMPARISONS or user.op == "output":
                continue
            elif (size := _looked_up(user, index)) is not None:
                bounds.append(size)
            else:
                return None
    return min(bounds, default=None)


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


def _is_positive(value: Tensor) -> bool:
    return bool((value >= 0).all())


def _overlaps_itself(value: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True))
