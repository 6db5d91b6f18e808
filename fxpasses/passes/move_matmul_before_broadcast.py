"""Apply linear layers before their inputs are broadcast."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    RESHAPES,
    calls_before,
    find_calls,
    is_call,
    shape_of,
    slice_bounds,
    untransposed,
)
from fxpasses.passes._options import require_at_least
from fxpasses.passes._rowwise import reshape

aten = torch.ops.aten

_MATMULS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class MoveMatmulBeforeBroadcast(Pass):
    """Multiply each row of an input before it is broadcast, instead of each row of the broadcast.

    A layer on all pairs, ``linear(cat([x[:, None].expand(n, n, d), x[None].expand(n, n, d)], -1))``,
    multiplies ``n * n`` rows, each of which repeats one of ``n``. The same is true of a conditioning vector
    repeated for every position. The weight is split by input features, and the sum broadcasts.

    Before::

        pairs = aten.cat([aten.expand(a, [64, 64, 32]), aten.expand(b, [64, 64, 32])], -1)   # a: f32[64, 1, 32]
        y = aten.mm(aten.view(pairs, [4096, 64]), weight)                                    # b: f32[1, 64, 32]

    After::

        y_a = aten.view(aten.mm(aten.view(a, [64, 32]), weight[:32]), [64, 1, 16])
        y_b = aten.view(aten.mm(aten.view(b, [64, 32]), weight[32:]), [1, 64, 16])
        y = aten.view(aten.add(y_a, y_b), [4096, 16])

    In the backward pass, the gradient is summed over the broadcast before it is multiplied, for the weight
    and for the inputs. Equal up to rounding.

    Attributes:
        gain: minimum ratio of multiplications in the forward matmul before and after.
    """

    name: ClassVar[str] = "move_matmul_before_broadcast"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")
    gain: float = 1.25

    def __post_init__(self) -> None:
        require_at_least(self, gain=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for matmul in find_calls(gm.graph, aten.mm.default):
            if _summed_parts(matmul) and claim(matmul):
                _sum_first(matmul)
                changed = True
        for matmul in find_calls(gm.graph, *_MATMULS):
            rows = _broadcast_rows(matmul.args[-2])
            if rows is None or rows.cost() * self.gain > math.prod(shape_of(matmul.args[-2]) or ()):
                continue
            if not rows.used_by_matmuls_alone() or not claim(matmul):
                continue
            for user, role in rows.matmuls():
                _multiply_parts(user, rows, role)
            changed = True
        return changed


@dataclass(frozen=True)
class _Rows:
    """``view(cat(parts, -1), [rows, columns])`` with parts that are broadcast.

    Attributes:
        matrix: the view.
        outer: the shape of the rows.
        parts: the concatenated values before broadcasting, each of rank ``len(outer) + 1``.
    """

    matrix: fx.Node
    outer: tuple[int, ...]
    parts: tuple[fx.Node, ...]

    def cost(self) -> int:
        return sum(math.prod(shape_of(part) or ()) for part in self.parts)

    def matmuls(self) -> list[tuple[fx.Node, str]]:
        """Return the matrix's matmuls and its role: rows (on the left), or left or right in a gradient."""
        found = []
        for user in self.matrix.users:
            if is_call(user, *_MATMULS):
                left = user.args[-2] is self.matrix
                found.append((user, "rows" if left else "gradient, right"))
            else:
                found.extend((matmul, "gradient, left") for matmul in user.users)
        # Gradient matmuls first: rewriting the others erases nodes.
        return sorted(found, key=lambda item: item[1])

    def used_by_matmuls_alone(self) -> bool:
        """Whether only matmuls of static sizes use the matrix, each of them once."""
        for user in self.matrix.users:
            if is_call(user, *_MATMULS):
                arguments = list(user.args)
                gradient = user.args[-2] if user.args[-1] is self.matrix else None
                if arguments.count(self.matrix) != 1 or (arguments[0] is self.matrix and len(arguments) == 3):
                    return False
                if gradient is not None and (len(arguments) == 3 or untransposed(gradient) is None):  # type: ignore[arg-type]
                    return False
            elif untransposed(user) is None or not all(
                is_call(p, aten.mm.default) and p.args[0] is user and p.args[1] is not user
                for p in user.users
            ):
                return False
            if user.kwargs:
                return False
        matmuls = [matmul for matmul, _ in self.matmuls()]
        sizes = [shape_of(node) for matmul in matmuls for node in matmul.all_input_nodes]
        return len(set(matmuls)) == len(matmuls) and None not in sizes


def _broadcast_rows(matrix: Any) -> _Rows | None:
    shape = shape_of(matrix)
    if shape is None or len(shape) != 2 or not is_call(matrix, *RESHAPES):
        return None
    whole: Any = matrix.args[0]
    if is_call(whole, aten.clone.default):
        whole = whole.args[0]
    sizes = shape_of(whole)
    if sizes is None or sizes[-1] != shape[1] or len(sizes) < 2:
        return None
    parts = [whole]
    if is_call(whole, aten.cat.default):
        if (whole.args[1] if len(whole.args) > 1 else 0) not in (-1, len(sizes) - 1):
            return None
        parts = list(whole.args[0])  # type: ignore[arg-type]
    compact = tuple(_before_expand(part) for part in parts)
    same = all(value_of(p).dtype is value_of(matrix).dtype for p in compact)
    return _Rows(matrix, sizes[:-1], compact) if same and compact != tuple(parts) else None


def _before_expand(part: fx.Node) -> fx.Node:
    """Return a part before it is broadcast over some of the rows."""
    source = part.args[0] if is_call(part, aten.expand.default) else part
    shape, wanted = shape_of(source), shape_of(part)
    if shape is None or wanted is None or len(shape) != len(wanted) or shape[-1] != wanted[-1]:
        return part
    return source  # type: ignore[return-value]


Call = Callable[..., fx.Node]


def _multiply_parts(matmul: fx.Node, rows: _Rows, role: str) -> None:
    call = calls_before(matmul, like=matmul)
    flat = [
        reshape(p, [value_of(p).numel() // value_of(p).shape[-1], value_of(p).shape[-1]], call)
        for p in rows.parts
    ]
    if role == "rows":
        replace(matmul, _forward(matmul, rows, flat, call))
        return
    if role == "gradient, right":
        gradient = untransposed(matmul.args[0])  # type: ignore[arg-type]
    else:
        gradient = matmul.args[1]  # type: ignore[assignment]
    assert gradient is not None
    results = []
    for part, matrix in zip(rows.parts, flat, strict=True):
        summed = _sum_to(gradient, rows.outer, shape_of(part) or (), call)
        left, right = (summed, matrix) if role == "gradient, right" else (matrix, summed)
        results.append(call(aten.mm.default, call(aten.permute.default, left, [1, 0]), right))
    replace(matmul, call(aten.cat.default, results, 1 if role == "gradient, right" else 0))


def _forward(matmul: fx.Node, rows: _Rows, flat: list[fx.Node], call: Call) -> fx.Node:
    weight: Any = matmul.args[-1]
    columns = value_of(weight).shape[1]
    terms, start = [], 0
    for part, matrix in zip(rows.parts, flat, strict=True):
        width = value_of(part).shape[-1]
        part_of_weight = call(aten.slice.Tensor, weight, 0, start, start + width)
        outer = list(value_of(part).shape[:-1])
        terms.append(
            call(aten.view.default, call(aten.mm.default, matrix, part_of_weight), [*outer, columns])
        )
        start += width
    total = functools.reduce(lambda a, b: call(aten.add.Tensor, a, b), terms)
    if shape_of(total) != (*rows.outer, columns):
        total = call(aten.expand.default, total, [*rows.outer, columns])
    result = reshape(total, [math.prod(rows.outer), columns], call)
    if matmul.target is aten.addmm.default:
        result = call(aten.add.Tensor, result, matmul.args[0])
    return result if same_metadata(value_of(result), value_of(matmul)) else _row_major(result, call)


def _row_major(node: fx.Node, call: Call) -> fx.Node:
    return call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _sum_to(matrix: fx.Node, outer: tuple[int, ...], shape: tuple[int, ...], call: Call) -> fx.Node:
    """Sum the rows of ``matrix``, indexed by ``outer``, where ``shape`` has size 1. Returns a matrix."""
    columns = value_of(matrix).shape[1]
    dims = [d for d, (size, whole) in enumerate(zip(shape[:-1], outer, strict=True)) if size == 1 != whole]
    if not dims:
        return matrix
    whole = reshape(matrix, [*outer, columns], call)
    summed = call(aten.sum.dim_IntList, whole, dims, True)
    return call(aten.view.default, summed, [math.prod(shape[:-1]), columns])


def _summed_parts(matmul: fx.Node) -> list[tuple[fx.Node, fx.Node, tuple[int, int]]]:
    """Return ``(view, sum, columns)`` per ``sum(slice(view(matmul)))``, if no other uses exist."""
    found: list[tuple[fx.Node, fx.Node, tuple[int, int]]] = []
    if len(matmul.users) != 1 or any(shape_of(n) is None for n in (matmul, *matmul.all_input_nodes)):
        return []
    (view,) = matmul.users
    shape = shape_of(view)
    columns = value_of(matmul).shape[1]
    if not is_call(view, *RESHAPES) or shape is None or len(shape) < 3 or shape[-1] != columns:
        return []
    for user in view.users:
        bounds = slice_bounds(user) if is_call(user, aten.slice.Tensor) else (len(shape) - 1, 0, columns)
        totals = list(user.users) if is_call(user, aten.slice.Tensor) else [user]
        if bounds is None or bounds[0] != len(shape) - 1 or not totals:
            return []
        for total in totals:
            if not is_call(total, aten.sum.dim_IntList) or total.kwargs:
                return []
            dims: Any = total.args[1]
            if not dims or any(d % len(shape) == len(shape) - 1 for d in dims):
                return []
            found.append((view, total, (bounds[1], bounds[2])))
    return found


def _sum_first(matmul: fx.Node) -> None:
    """Sum the rows of the left operand before multiplying."""
    left: Any
    left, right = matmul.args
    for view, total, (start, end) in _summed_parts(matmul):
        call = calls_before(total)
        outer = list(value_of(view).shape[:-1])
        whole = reshape(left, [*outer, value_of(left).shape[1]], call)
        summed = call(aten.sum.dim_IntList, whole, total.args[1], True)
        part_of_weight = call(aten.slice.Tensor, right, 1, start, end)
        rows = [value_of(summed).numel() // value_of(left).shape[1], value_of(left).shape[1]]
        result = call(aten.mm.default, call(aten.view.default, summed, rows), part_of_weight)
        result = call(aten.view.default, result, list(value_of(total).shape))
        if not same_metadata(value_of(result), value_of(total)):
            result = _row_major(result, call)
        replace(total, result)
