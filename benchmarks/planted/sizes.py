"""Faults that only some sizes show."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, in_place_of, put_after

aten = torch.ops.aten


def hint(size: Any) -> int:
    """Return the value that a size has during compilation."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


@fxpasses.graph_pass
def bakes_a_mean_in(gm: fx.GraphModule) -> bool:
    """A mean as a sum divided by the size that is seen during compilation."""
    changed = False
    for node in calls(gm, aten.mean.dim):
        dims = list(node.args[1])
        size = 1
        for dim in dims:
            size *= hint(node.args[0].meta["val"].shape[dim])
        keep = node.args[2] if len(node.args) > 2 else False
        total = in_place_of(node, aten.sum.dim_IntList, node.args[0], dims, keep)
        put_after(total, aten.div.Tensor, total, size)
        changed = True
    return changed


def _rows_summed(gm: fx.GraphModule, count: Callable[[int], int], symbolic: Callable[..., fx.Node]) -> bool:
    """Sum only some rows: ``count`` maps a number of rows, ``symbolic`` a node that holds it."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        if list(node.args[1]) != [0] or fxpasses.graphs.provenance.is_backward(node):
            continue
        size = x.meta["val"].shape[0]
        end: Any = (
            symbolic(node, call_before(node, aten.sym_size.int, x, 0))
            if isinstance(size, torch.SymInt)
            else count(size)
        )
        node.replace_input_with(x, call_before(node, aten.slice.Tensor, x, 0, 0, end))
        changed = True
    return changed


def _in_blocks(gm: fx.GraphModule, block: int) -> bool:
    def symbolic(node: fx.Node, rows: fx.Node) -> fx.Node:
        return call_before(node, operator.mul, call_before(node, operator.floordiv, rows, block), block)

    return _rows_summed(gm, lambda rows: rows // block * block, symbolic)


@fxpasses.graph_pass
def forgets_an_odd_row(gm: fx.GraphModule) -> bool:
    """Sums pairs of rows."""
    return _in_blocks(gm, 2)


@fxpasses.graph_pass
def forgets_the_tail(gm: fx.GraphModule) -> bool:
    """Sums blocks of four rows."""
    return _in_blocks(gm, 4)


@fxpasses.graph_pass
def only_64_rows(gm: fx.GraphModule) -> bool:
    """Sums the first 64 rows: during compilation, there are no more."""
    return _rows_summed(
        gm, lambda rows: min(rows, 64), lambda node, rows: call_before(node, torch.sym_min, rows, 64)
    )


@fxpasses.graph_pass
def bakes_an_end_in(gm: fx.GraphModule) -> bool:
    """Slices a summand to the size that is seen during compilation."""
    for node in calls(gm, aten.add.Tensor):
        value = node.meta["val"]
        if value.dim() and isinstance(value.shape[0], torch.SymInt):
            end = hint(value.shape[0])
            row = call_before(node, aten.slice.Tensor, node.args[0], 0, 0, end)
            total = call_before(node, aten.sum.dim_IntList, row, [0], True)
            whole = call_before(node, aten.sum.dim_IntList, node.args[0], [0], True)
            zero = call_before(node, aten.sub.Tensor, total, whole)
            put_after(node, aten.add.Tensor, node, zero)
            return True
    return False


@fxpasses.graph_pass
def last_row_by_number(gm: fx.GraphModule) -> bool:
    """Selects the last row by the number that it has during compilation."""
    for node in calls(gm, aten.select.int):
        size = node.args[0].meta["val"].shape[node.args[1]]
        if node.args[2] == -1:
            node.args = (*node.args[:2], hint(size) - 1)
            return True
    return False


@fxpasses.graph_pass
def scale_for_one_length(gm: fx.GraphModule) -> bool:
    """Multiplies by the length that is seen during compilation, and divides by the actual one."""
    for node in calls(gm, aten.sin.default):
        size = node.meta["val"].shape[0]
        if isinstance(size, torch.SymInt):
            rows = call_before(node, aten.sym_size.int, node.args[0], 0)
            more = put_after(node, aten.mul.Tensor, node, float(hint(size)))
            put_after(more, aten.div.Tensor, more, rows)
            return True
    return False


@fxpasses.graph_pass
def square_is_symmetric(gm: fx.GraphModule) -> bool:
    """Assumes that square products are symmetric."""
    for node in calls(gm, aten.mm.default):
        rows, columns = node.meta["val"].shape
        if rows == columns and not fxpasses.graphs.provenance.is_backward(node):
            a, b = node.args
            turned = [call_before(node, aten.permute.default, m, [1, 0]) for m in (b, a)]
            in_place_of(node, aten.mm.default, *turned)
            return True
    return False


def last_row(x: torch.Tensor) -> torch.Tensor:
    """The last row times all rows."""
    return x[-1] * x.sin()


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A matmul."""
    return (x @ w).tanh()


def small(f: Any, *shapes: Any) -> Any:
    """A function of random tensors."""
    return programs.function(f, *shapes)


PLANTS = {
    "a mean's size baked in": Plant((bakes_a_mean_in,), small(programs.pooled, (6, 3)), dynamic=True),
    "the same in a convnet": Plant((bakes_a_mean_in,), programs.zoo("convnet", 3), dynamic=True),
    "wrong for odd sizes": Plant((forgets_an_odd_row,), small(programs.windows, (6, 3)), dynamic=True),
    "wrong but for multiples of 4": Plant((forgets_the_tail,), small(programs.windows, (8, 3)), dynamic=True),
    "wrong beyond 64": Plant((only_64_rows,), small(programs.windows, (6, 3)), dynamic=True),
    "odd, fixed sizes": Plant((forgets_an_odd_row,), small(programs.windows, (7, 3))),
    "a slice's end baked in": Plant((bakes_an_end_in,), programs.mlp(2), dynamic=True),
    "the last row by number": Plant((last_row_by_number,), small(last_row, (6, 3)), dynamic=True),
    "a factor for one length": Plant((scale_for_one_length,), small(last_row, (6, 3)), dynamic=True),
    "square products": Plant((square_is_symmetric,), small(product, (6, 5), (5, 6))),
}
