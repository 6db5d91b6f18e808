"""Accumulate gradients without zeros: scatter into the value to which a scatter into zeros is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import insert_call, replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim

aten = torch.ops.aten

_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_FULLS = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
_ACCUMULATING = {
    aten.scatter_add.default,
    aten.index_add.default,
    aten._unsafe_masked_index_put_accumulate.default,
}

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FuseScatterAdd(Pass):
    """Scatter sparse contributions directly into the value that they are added to later.

    The gradient of an embedding is scattered into zeros of the size of the table. If the table has another
    gradient as well (tied embeddings: the output projection), the two are added. The zeros and the addition
    each pass over the whole table, but the scatter can start from the other gradient instead. Inductor does
    not do this. Also applies to ``scatter_add`` and ``index_add``.

    Before::

        zeros = aten.full([50257, 768], 0)
        sparse = aten.index_put(zeros, [tokens], grad, True)
        total = aten.add(dense, sparse)

    After::

        total = aten.index_put(dense, [tokens], grad, True)

    The sums have the same terms in another order: equal up to rounding. In low precision, the sum of the
    contributions is left alone: each of them alone may be lost beside a large value.
    """

    name: ClassVar[str] = "fuse_scatter_add"
    contract: ClassVar[Contract] = Contract(
        ("joint", "backward"), invalidates="no_dead_code", metadata="exact"
    )

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for add in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if len(add.args) != 2 or add.kwargs.get("alpha", 1) != 1:
                continue
            for scattered, dense in (add.args, tuple(reversed(add.args))):
                if not (isinstance(scattered, fx.Node) and isinstance(dense, fx.Node)):
                    continue
                if not _accumulates_into_zeros(scattered) or len(scattered.users) != 1:
                    continue
                # Starting from another dtype, layout or a broadcast value would change the result.
                if not same_metadata(value_of(scattered), value_of(dense)):
                    continue
                if value_of(dense).dtype in _LOW_PRECISION:
                    continue
                if not same_metadata(value_of(add), value_of(dense)):
                    continue
                if not claim(add):
                    break
                with gm.graph.inserting_before(add):
                    args = (dense, *scattered.args[1:])
                    total = insert_call(gm.graph, scattered.target, args, scattered.kwargs, like=scattered)
                replace(add, total)
                gm.graph.erase_node(scattered)
                changed = True
                break
        return changed


def _accumulates_into_zeros(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node) or not _is_zeros(node.args[0]):
        return False
    if node.target is aten.index_put.default:
        return len(node.args) == 4 and node.args[3] is True
    return node.target in _ACCUMULATING


def _is_zeros(node: fx.Node) -> bool:
    if node.target in _FULLS:
        position = _FULLS[node.target]
        fill = node.args[position] if len(node.args) > position else None
        return isinstance(fill, (int, float)) and fill == 0
    return node.target in _ZEROS
