"""Order chains of matmuls by cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, find_calls, is_call, shape_of
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten

_MATMULS = (aten.mm.default, aten.bmm.default)


@dataclass(frozen=True)
class ReassociateMatmuls(Pass):
    """Multiply ``(a b) c`` as ``a (b c)`` if that takes fewer operations.

    A low-rank update written as ``x @ (down @ up)`` computes the full matrix in every call, and its full
    gradient. Attention without softmax, ``(q @ k.T) @ v``, computes a value for every pair of positions.

    Before::

        full = aten.mm(down, up)             # f32[1024, 8], f32[8, 1024]
        y = aten.mm(x, full)                 # x: f32[256, 1024]

    After::

        part = aten.mm(x, down)
        y = aten.mm(part, up)

    A matmul is split up if all its users are matmuls (possibly through transposes) that together get cheaper
    by at least the factor ``gain``. In training, these are the forward matmul and the one for the gradient.
    Equal up to rounding.

    Attributes:
        gain: minimum ratio of multiplications before and after.
    """

    name: ClassVar[str] = "reassociate_matmuls"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")
    gain: float = 1.25

    def __post_init__(self) -> None:
        require_at_least(self, gain=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for inner in reversed(find_calls(gm.graph, *_MATMULS)):
            uses = _uses(inner)
            if not uses:
                continue
            before = _cost(inner) + sum(_cost(user) for user, _ in uses)
            after = sum(_reassociated_cost(inner, user, flipped) for user, flipped in uses)
            if before >= after * self.gain and claim(inner):
                for user, flipped in uses:
                    _reassociate(inner, user, flipped)
                changed = True
        return changed


def _uses(inner: fx.Node) -> list[tuple[fx.Node, bool]]:
    """Return the matmuls that use ``inner``, and whether transposed; empty if anything else uses it."""
    uses: list[tuple[fx.Node, bool]] = []
    for user in inner.users:
        flipped = _is_transpose(user)
        for matmul in user.users if flipped else [user]:
            used = user if flipped else inner
            arguments = list(matmul.args[:2])
            if not is_call(matmul, inner.target) or arguments.count(used) != 1:
                return []
            uses.append((matmul, flipped))
    shapes = [shape_of(x) for x in (*inner.args, *(a for matmul, _ in uses for a in matmul.args))]
    # A matmul that uses both the value and its transpose is not linear in it.
    once = len({matmul for matmul, _ in uses}) == len(uses)
    return uses if once and None not in shapes else []


def _is_transpose(node: fx.Node) -> bool:
    """Whether ``node`` swaps the last two dimensions, and only those."""
    if not is_call(node, aten.permute.default):
        return False
    rank = value_of(node).dim()
    dims = [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    return dims == [*range(rank - 2), rank - 1, rank - 2]


def _cost(matmul: fx.Node) -> int:
    """Return the number of multiplications."""
    left, right = (shape_of(x) for x in matmul.args[:2])
    assert left is not None
    assert right is not None
    return math.prod(left) * right[-1]


def _reassociated_cost(inner: fx.Node, user: fx.Node, flipped: bool) -> int:
    """Return the number of multiplications of ``user`` with ``inner`` split up."""
    left, right = (shape_of(x) for x in inner.args[:2])
    assert left is not None
    assert right is not None
    *batch, rows, between = left
    columns = right[-1]
    if flipped:
        rows, columns = columns, rows
    shape = shape_of(user)
    assert shape is not None
    other = shape[-2] if _is_right_operand(inner, user) else shape[-1]
    return math.prod(batch) * other * between * (rows + columns)


def _is_right_operand(inner: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` multiplies ``inner`` from the left."""
    right = user.args[1]
    return right is inner or (isinstance(right, fx.Node) and right in inner.users and _is_transpose(right))


def _reassociate(inner: fx.Node, user: fx.Node, flipped: bool) -> None:
    call = calls_before(user, like=user)
    left, right = inner.args[:2]
    if flipped:
        left, right = (_transpose(x, call) for x in (right, left))
    if _is_right_operand(inner, user):
        new = call(user.target, call(user.target, user.args[0], left), right)
    else:
        new = call(user.target, left, call(user.target, right, user.args[1]))
    replace(user, new)


def _transpose(node: Any, call: Callable[..., fx.Node]) -> fx.Node:
    if _is_transpose(node):
        return node.args[0]
    rank = value_of(node).dim()
    return call(aten.permute.default, node, [*range(rank - 2), rank - 1, rank - 2])
