"""Merge matmuls with the same right operand into one matmul."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, find_calls, needed_before, shape_of
from fxpasses.passes._options import require_at_least
from fxpasses.passes._saved import depending_on_gradients

aten = torch.ops.aten


@dataclass(frozen=True)
class ConcatMatmuls(Pass):
    """Concatenate the rows of several matmuls with the same weight, and multiply once.

    A network written as a loop over time applies the same layers at every step. If a layer's inputs do not
    depend on its results (inputs of the first layer, logits, and in the backward pass the gradients of both),
    all steps are one matmul, and the weight is read once.

    Before::

        a = aten.addmm(bias, x_0, weight)                # x_0, x_1: f32[20, 650], weight: f32[650, 2600]
        ...
        b = aten.addmm(bias, x_1, weight)

    After::

        both = aten.addmm(bias, aten.cat([x_0, x_1]), weight)
        a = aten.slice(both, 0, 0, 20)
        ...
        b = aten.slice(both, 0, 20, 40)

    Calls that later inputs need move before the first matmul. Matmuls of the forward and backward pass stay
    separate. Equal up to rounding: a matmul with more rows may be computed in another order.

    Attributes:
        max_rows: matmuls with more rows are left alone: they reuse the weight enough, and their rows are
            copied.
    """

    name: ClassVar[str] = "concat_matmuls"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")
    max_rows: int = 64

    def __post_init__(self) -> None:
        require_at_least(self, max_rows=1)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        aliases = AliasInfo(gm.graph)
        for members in self._groups(gm.graph, aliases):
            while len(members) > 1:
                members.sort()  # other groups may have moved some
                chosen = _independent(gm.graph, members)
                members = [node for node in members if node not in chosen]
                if len(chosen) == 1:
                    continue
                needed = needed_before([node.args[-2] for node in chosen], chosen[0])  # type: ignore[misc]
                if needed is not None and needed.isdisjoint(chosen) and claim(chosen[0]):
                    _multiply(chosen, needed, aliases)
                    changed = True
        return changed

    def _groups(self, graph: fx.Graph, aliases: AliasInfo) -> list[list[fx.Node]]:
        """Group matmuls with the same right operand, bias, and pass (forward or backward)."""
        late = depending_on_gradients(graph)
        groups: dict[Any, list[fx.Node]] = {}
        for node in find_calls(graph, aten.mm.default, aten.addmm.default):
            left, right = node.args[-2:]
            rows = (shape_of(left) or (0,))[0]
            columns = (shape_of(node) or (0, 0))[1]
            if not 0 < rows <= min(self.max_rows, columns) or not value_of(node).is_contiguous():
                continue
            # Written memory would be read at another time; checkpointed calls are recomputed.
            written = any(aliases.roots(n) & aliases.mutated for n in node.all_input_nodes)
            if node.kwargs or written or "recompute" in node.meta:
                continue
            bias = node.args[0] if node.target is aten.addmm.default else None
            if bias is not None and value_of(bias).dim() != 1:  # type: ignore[arg-type]
                continue
            groups.setdefault((right, bias, node in late), []).append(node)
        return list(groups.values())


def _reached(graph: fx.Graph, starts: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return, per node, which of ``starts`` it is or depends on, as a bit mask."""
    bits = {node: 1 << number for number, node in enumerate(starts)}
    reached: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found = bits.get(node, 0)
        for source in node.all_input_nodes:
            found |= reached[source]
        reached[node] = found
    return reached


def _independent(graph: fx.Graph, members: list[fx.Node]) -> list[fx.Node]:
    """Return the first of ``members`` (in graph order), and all whose rows depend on no other chosen one."""
    reached = _reached(graph, members)
    chosen, results = [], 0
    for number, node in enumerate(members):
        if not reached[node.args[-2]] & results:  # type: ignore[index]
            chosen.append(node)
            results |= 1 << number
    return chosen


def _multiply(matmuls: list[fx.Node], needed: set[fx.Node], aliases: AliasInfo) -> None:
    first = matmuls[0]
    for node in sorted(needed):
        first.prepend(node)
    call = calls_before(first, like=first)
    rows = call(aten.cat.default, [node.args[-2] for node in matmuls], 0)
    whole = call(first.target, *first.args[:-2], rows, first.args[-1])
    ends = itertools.accumulate((value_of(node).shape[0] for node in matmuls), initial=0)
    parts = [call(aten.slice.Tensor, whole, 0, *bounds) for bounds in itertools.pairwise(ends)]
    for position, node in enumerate(matmuls):
        if aliases.roots(node) & aliases.output:  # outputs must own their memory
            parts[position] = call(aten.clone.default, parts[position])
    for node, part in zip(matmuls, parts, strict=True):
        assert same_metadata(value_of(node), value_of(part))
        replace(node, part)
