"""Which values of a graph may share memory, and which memory the graph writes to.

Read off the operator schemas: a result that is annotated as an alias of an argument (``Tensor(a)``) has
the storage of that argument. Operators without such a schema (higher-order ones) count as aliasing all
of their inputs.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpasses._torch import OpOverload

__all__ = ["AliasInfo", "is_mutating", "is_random"]


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random number generator."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


class AliasInfo:
    """Alias analysis of one graph, as it is at the time of the call.

    Attributes:
        mutated: the roots (see :meth:`roots`) whose memory some node writes to.
        output: the roots of what the graph returns.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.mutated: set[fx.Node] = set()
        self.output: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                for value in node.all_input_nodes:
                    self.output |= self._roots[value]
                continue
            self._roots[node] = self._roots_of(node)
            for value in _written(node):
                self.mutated |= self._roots[value]

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes in whose memory ``node``'s value may lie: itself when it is fresh."""
        return self._roots[node]

    def written_by(self, node: fx.Node) -> frozenset[fx.Node]:
        """The roots of the memory that ``node`` writes to."""
        return frozenset().union(*(self._roots[value] for value in _written(node)))

    def _roots_of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op in ("placeholder", "get_attr"):
            return frozenset([node])
        aliased = _aliased_arguments(node)
        if not aliased:
            return frozenset([node])
        return frozenset().union(*(self._roots[value] for value in aliased))


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    target = node.target
    if not isinstance(target, OpOverload):
        return list(node.all_input_nodes)  # getitem, higher-order operators, module calls
    if not any(r.alias_info is not None for r in target._schema.returns):
        return []
    return [value for value, info in _arguments(node) if info.alias_info is not None]


def _written(node: fx.Node) -> list[fx.Node]:
    if not is_mutating(node):
        return []
    return [
        value for value, info in _arguments(node) if info.alias_info is not None and info.alias_info.is_write
    ]


def _arguments(node: fx.Node) -> list[tuple[fx.Node, torch.Argument]]:
    schema = node.target._schema  # type: ignore[union-attr]
    found: list[tuple[fx.Node, torch.Argument]] = []
    for position, info in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(info.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        found.extend((v, info) for v in values if isinstance(v, fx.Node))
    return found
