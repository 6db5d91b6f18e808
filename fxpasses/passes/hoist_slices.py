"""Move slices up, so that rows that no result depends on are not computed."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    calls_before,
    erase_unused,
    is_call,
    is_pure,
    returned_values,
    shape_of,
    slice_bounds,
    update_values,
)
from fxpasses.passes._rowwise import Selection, select_inputs

aten = torch.ops.aten


@dataclass(frozen=True)
class HoistSlices(Pass):
    """Select before computing if only part of a result is used.

    A language model that predicts the next token needs the logits of the last position, and a classifier the
    features of the first; both compute all of them. The selection moves up through everything that treats
    positions separately: norms, linear layers, residuals, and the queries of the last attention.

    Before::

        logits = aten.mm(hidden, weight)                    # hidden: f32[512, 768], weight: f32[768, 50257]
        last = aten.slice(logits, 0, 511, 512)

    After::

        part = aten.slice(hidden, 0, 511, 512)
        last = aten.mm(part, weight)

    Applies to slices and selections with constant bounds of values without other users. Each row has the same
    terms; a matmul with fewer rows may round differently.
    """

    name: ClassVar[str] = "hoist_slices"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        written = {n for n in gm.graph.nodes if n.op != "output" and aliases.roots(n) & aliases.mutated}
        shared = _returned_twice(gm.graph, aliases)
        (output,) = gm.graph.find_nodes(op="output")
        moved = 0
        returned = returned_values(gm.graph)
        other_strides: set[fx.Node] = set()
        node = output.prev
        # From end to start: a selection that moves up is inserted before the node, and visited later.
        while node.op != "root":
            fixed = written.intersection((node, *node.all_input_nodes)) or shared.intersection(_results(node))
            chosen = None if fixed else _selected_part(node)
            if chosen is not None and claim(node):
                moved += _move(node, chosen, other_strides)
            used_up, node = node, node.prev
            if moved:
                erase_unused(used_up)
        update_values(gm, other_strides, returned)
        return moved > 0


def _selection(node: fx.Node) -> Selection | None:
    """Return the slice of its input that ``node`` selects, keeping the dimension; None for any other call."""
    shape = shape_of(node.args[0]) if node.args else None
    if shape is None or not is_call(node, aten.slice.Tensor, aten.select.int):
        return None
    if node.target is aten.select.int:
        dim, index = int(node.args[1]) % len(shape), node.args[2]  # type: ignore[arg-type]
        if not isinstance(index, int) or shape[dim] == 1:
            return None
        start = index % shape[dim]
        return Selection(dim, start, start + 1)
    bounds = slice_bounds(node)
    if bounds is None or bounds[1] == bounds[2] or bounds[2] - bounds[1] == shape[bounds[0]]:
        return None
    return Selection(*bounds)


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the node, or for a call with several results the nodes that unpack them."""
    if not isinstance(value_of(node), (tuple, list)):
        return [node]
    return [item for item in node.users if item.target is operator.getitem]


def _selected_part(node: fx.Node) -> Selection | None:
    """Return the part of a call's result that all of its users select, or None."""
    if node.op != "call_function" or node.target is operator.getitem or not is_pure(node):
        return None
    results = _results(node)
    if results != [node] and len(results) != len(node.users):
        return None
    wanted = {_selection(user) for result in results for user in result.users}
    return wanted.pop() if len(wanted) == 1 else None


def _returned_twice(graph: fx.Graph, aliases: AliasInfo) -> set[fx.Node]:
    """Return the values whose memory holds two outputs of the graph, which must stay views of each other."""
    (output,) = graph.find_nodes(op="output")
    counts = Counter(
        root for result in output.args[0] if isinstance(result, fx.Node) for root in aliases.roots(result)
    )
    twice = {root for root, count in counts.items() if count > 1}
    return {node for node in graph.nodes if node is not output and aliases.roots(node) & twice}


def _move(node: fx.Node, chosen: Selection, other_strides: set[fx.Node]) -> int:
    """Compute only the chosen part of ``node``'s result. Returns how many calls changed."""
    call = calls_before(node, like=node)
    new = select_inputs(node, chosen, call)
    if new is None:
        return 0
    parts = {
        result: new if result is node else call(operator.getitem, new, result.args[1])
        for result in _results(node)
    }
    for user in [user for result in parts for user in result.users]:
        part = parts[user.args[0]]  # type: ignore[index]
        if user.target is aten.select.int:
            part = calls_before(user)(aten.select.int, part, chosen.dim, 0)
        if not same_metadata(value_of(part), value_of(user)):
            other_strides.add(part)
        replace(user, part)
    for item in parts:
        if item is not node:
            erase_unused(item)
    return 1
