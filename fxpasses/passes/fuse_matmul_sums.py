"""Compute sums of matmuls as one matmul."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    calls_before,
    find_calls,
    is_call,
    restride,
    shape_of,
    transposed,
    untransposed,
)
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseMatmulSums(Pass):
    """Compute a sum of matmuls as one matmul of their concatenated operands.

    A weight that is used at every step of a recurrent network, or in every layer, has a gradient that is a
    sum. Each term is as large as the weight, and is written and read again to be added, for only the few rows
    of one step.

    Before::

        a = aten.mm(aten.permute(grad_0, [1, 0]), x_0)              # f32[2600, 650]
        b = aten.mm(aten.permute(grad_1, [1, 0]), x_1)              # grad_1: f32[20, 2600], x_1: f32[20, 650]
        total = aten.add(a, b)

    After::

        grads = aten.cat([grad_0, grad_1])                          # f32[40, 2600]
        total = aten.mm(aten.permute(grads, [1, 0]), aten.cat([x_0, x_1]))

    Applies to sums whose matmuls are used nowhere else and have operands smaller than the result, since the
    operands are copied. Equal up to rounding: the sums have the same terms in another order.

    Attributes:
        gain: minimum ratio of elements written by the matmuls that are saved to elements copied.
    """

    name: ClassVar[str] = "fuse_matmul_sums"
    contract: ClassVar[Contract] = Contract(("joint", "backward", "inference"), numerics="tolerance")
    gain: float = 2.0

    def __post_init__(self) -> None:
        require_at_least(self, gain=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        changed = False
        for total in find_calls(gm.graph, aten.add.Tensor):
            if not _is_sum(total) or not value_of(total).is_contiguous():
                continue
            if len(total.users) == 1 and _is_sum(next(iter(total.users))):
                continue  # part of a larger sum
            terms = [_Term(node) for node in _terms(total)]
            matmuls = [
                term for term in terms if term.is_matmul() and not term.reads(aliases.mutated, aliases)
            ]
            if self._is_profitable(matmuls) and claim(total):
                _multiply(total, matmuls, [term.node for term in terms if term not in matmuls])
                aliases, changed = AliasInfo(gm.graph), True
        return changed

    def _is_profitable(self, matmuls: list[_Term]) -> bool:
        if len(matmuls) < 2:
            return False
        rows, columns = value_of(matmuls[0].node).shape
        copied = sum(matmul.inner * (rows + columns) for matmul in matmuls)
        return copied * self.gain <= (len(matmuls) - 1) * rows * columns


def _is_sum(node: Any) -> bool:
    """Whether a node, not marked for recomputation, adds two matrices of equal dtype and static shape."""
    if not is_call(node, aten.add.Tensor) or node.kwargs or "recompute" in node.meta:
        return False
    shape, dtype = shape_of(node), value_of(node).dtype
    return all(
        isinstance(n, fx.Node) and shape_of(n) == shape is not None and value_of(n).dtype is dtype
        for n in node.args
    )


def _terms(total: fx.Node) -> list[fx.Node]:
    """Return the terms of ``total``, flattening sums that have no other user."""
    terms: list[fx.Node] = []
    pending = [total]
    while pending:
        node = pending.pop()
        if node is total or (_is_sum(node) and len(node.users) == 1):
            pending.extend(reversed(node.args))  # type: ignore[arg-type]
        else:
            terms.append(node)
    return terms


class _Term:
    """A term of a sum: a matmul, its transpose, or something else.

    Attributes:
        node: the term.
        matmul: the call of ``mm`` behind it, if any.
        flipped: whether the term is the transpose of the matmul.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = self.matmul = node
        self.flipped = False
        while len(self.matmul.users) == 1 and (source := untransposed(self.matmul)) is not None:
            self.matmul, self.flipped = source, not self.flipped

    def is_matmul(self) -> bool:
        """Whether the term is a matmul that only the sum uses."""
        return (
            is_call(self.matmul, aten.mm.default)
            and len(self.matmul.users) == 1
            and len(self.node.users) == 1
            and "recompute" not in self.matmul.meta
            and None not in map(shape_of, self.matmul.args)
        )

    def reads(self, memory: set[fx.Node], aliases: AliasInfo) -> bool:
        """Whether an operand may be in this memory."""
        return any(aliases.roots(operand) & memory for operand in self.matmul.all_input_nodes)

    @property
    def inner(self) -> int:
        return value_of(self.matmul.args[0]).shape[1]  # type: ignore[arg-type]

    def operands(self, call: Callable[..., fx.Node]) -> tuple[fx.Node, fx.Node]:
        """Return the transpose of the left operand, and the right operand, of the term as a matmul."""
        left: Any
        right: Any
        left, right = self.matmul.args
        return (right, transposed(left, call)) if self.flipped else (transposed(left, call), right)


def _multiply(total: fx.Node, matmuls: list[_Term], others: list[fx.Node]) -> None:
    call = calls_before(total, like=total)
    lefts, rights = zip(*(matmul.operands(call) for matmul in matmuls), strict=True)
    left, right = (call(aten.cat.default, list(parts), 0) for parts in (lefts, rights))
    result = call(aten.mm.default, call(aten.permute.default, left, [1, 0]), right)
    for other in others:
        result = call(aten.add.Tensor, other, result)
    if not same_metadata(value_of(result), value_of(total)):
        result = restride(result, value_of(total), call)
    replace(total, result)
