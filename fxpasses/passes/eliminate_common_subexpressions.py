"""Common subexpression elimination: reuse values that were computed before."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fake.seam.fx import has_effects
from fxpasses.graphs.aliasing import AliasInfo, is_mutating, is_random
from fxpasses.graphs.rewriting import replace
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim


@dataclass(frozen=True)
class EliminateCommonSubexpressions(Pass):
    """Compute equal calls once.

    Calls are equal if operator and arguments are, including the type of each constant (``1``, ``1.0`` and
    ``True`` differ). Not merged: random calls, calls with effects, calls on or in memory that the graph
    writes to, two values that are both returned (they would alias each other), and calls with different
    activation-checkpointing decisions.

    Before::

        a = aten.exp(x)
        b = aten.exp(x)
        return aten.mul(a, b)

    After::

        a = aten.exp(x)
        return aten.mul(a, a)
    """

    name: ClassVar[str] = "eliminate_common_subexpressions"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="bitwise", metadata="exact")

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        seen: dict[Any, fx.Node] = {}
        replaced: dict[fx.Node, fx.Node] = {}
        for node in list(gm.graph.nodes):
            key = self._key(node, aliases)
            if key is None:
                continue
            first = seen.setdefault(key, node)
            if first is node:
                continue
            memory, first_memory = _result_roots(node, aliases), _result_roots(first, aliases)
            if first_memory & aliases.output and memory & aliases.output:
                continue
            if not claim(node):
                continue
            # Outputs returned through `node` are returned through `first` from here on.
            if memory & aliases.output:
                aliases.output |= first_memory
            replaced[node] = first
            replace(node, first)
        return bool(replaced)

    def _key(self, node: fx.Node, aliases: AliasInfo) -> Any:
        if node.op == "get_attr":
            return ("get_attr", node.target)
        if node.op != "call_function" or is_random(node) or is_mutating(node):
            return None
        target = node.target
        if isinstance(target, OpOverload):
            if has_effects(target) or not target._schema.returns:
                return None
        elif getattr(target, "__module__", None) != "_operator":
            return None
        touched = aliases.roots(node).union(*(aliases.roots(n) for n in node.all_input_nodes))
        if touched & aliases.mutated:
            return None
        policy = tuple(repr(node.meta.get(k)) for k in ("recompute", "ac_graph_id", "partitioner_tag"))
        try:
            key = (target, _hashable(node.args), _hashable(node.kwargs), policy)
            hash(key)
        except TypeError:
            return None  # an argument that cannot be compared, such as a Generator
        return key


def _result_roots(node: fx.Node, aliases: AliasInfo) -> frozenset[fx.Node]:
    """Return the roots of a call's results."""
    items = [user for user in node.users if user.target is operator.getitem]
    return aliases.roots(node).union(*(aliases.roots(item) for item in items))


def _hashable(argument: Any) -> Any:
    """Return a hashable form of an argument in which equal values of different types differ."""
    if isinstance(argument, (list, tuple)):
        return tuple(_hashable(a) for a in argument)
    if isinstance(argument, dict):
        return tuple(sorted((k, _hashable(v)) for k, v in argument.items()))
    if isinstance(argument, slice):
        return ("slice", _hashable(argument.start), _hashable(argument.stop), _hashable(argument.step))
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("comparing symbolic values would add a guard")
    if isinstance(argument, float):
        return (float, argument.hex())  # -0.0 and 0.0 are equal but not the same
    return argument if isinstance(argument, fx.Node) else (type(argument), argument)
