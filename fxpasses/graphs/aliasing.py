"""Aliasing and mutation: which values of a graph may share memory, and which memory the graph writes to.

This is read from the operator schemas: a result that is annotated as an alias of an argument (``Tensor(a)``)
has that argument's storage. Operators without such a schema (higher-order ones) count as aliasing all of
their inputs.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fake.seam.fx import has_effects
from fxpasses.graphs.rewriting import attribute_of

aten = torch.ops.aten

_METADATA_READERS = {
    aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and _schema_facts(target).is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the node's operator may call the RNG."""
    target = node.target
    return isinstance(target, OpOverload) and _schema_facts(target).is_random


def uses_rng(node: fx.Node) -> bool:
    """Whether the node actually calls the RNG. Attention and dropout with probability zero do not."""
    target = node.target
    if not isinstance(target, OpOverload) or not _schema_facts(target).is_random:
        return False
    position = _schema_facts(target).dropout
    if position is None:
        return True
    given = (
        node.args[position]
        if position < len(node.args)
        else node.kwargs.get(_schema_facts(target).names[position], 0.0)
    )
    return bool(given != 0.0)


def has_effect(node: fx.Node) -> bool:
    """Whether the node has an effect that no value shows: it prints, asserts, waits. Excludes mutation."""
    target = node.target
    if isinstance(target, OpOverload):
        return has_effects(target) or (
            _schema_facts(target).returns_nothing and not _schema_facts(target).is_mutable
        )
    return getattr(target, "__name__", "") == "with_effects"


def effect_of(node: fx.Node) -> Any:
    """The operator of a ``with_effects`` call; ``None`` for other calls and for repeatable checks."""
    if getattr(node.target, "__name__", "") != "with_effects":
        return None
    effect = node.args[1]
    return None if only_checks(effect) else effect


def only_checks(target: Any) -> bool:
    """Whether an ATen operator returns nothing, and only rejects some of its arguments."""
    is_mute = isinstance(target, OpOverload) and target.namespace == "aten" and not target._schema.returns
    return is_mute and target is not aten._print.default


def is_assertion(node: fx.Node) -> bool:
    """Whether the node either raises or does nothing (``aten._assert_async``, ``aten._assert_scalar``)."""
    return isinstance(node.target, OpOverload) and node.target._schema.name.startswith("aten::_assert_")


def reads_only_metadata(node: fx.Node) -> bool:
    """Whether the node reads only sizes and dtypes of its arguments, not their memory."""
    return node.target in _METADATA_READERS


def is_alias(node: fx.Node) -> bool:
    """Whether the node's value may share memory with one of its arguments."""
    return bool(aliased_arguments(node))


class AliasInfo:
    """Alias analysis of one graph, as the graph is at the time of the call.

    Attributes:
        mutated: the roots (see :meth:`roots`) whose memory some node writes to.
        output: the roots of the graph's outputs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._roots: dict[fx.Node, frozenset[fx.Node] | None] = {}
        """``None`` for a fresh value, which most values are."""
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}
        """For each result of a call, the first node that extracts it."""
        self.mutated: set[fx.Node] = set()
        self.output: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                for value in node.all_input_nodes:
                    self.output |= self.roots(value)
                continue
            self._roots[node] = self._roots_of(node)
            for value in _written(node):
                self.mutated |= self.roots(value)

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes whose memory ``node``'s value may share; the node itself if its value is fresh."""
        return self._roots[node] or frozenset([node])

    def written_by(self, node: fx.Node) -> frozenset[fx.Node]:
        """The roots of the memory that ``node`` writes to."""
        return frozenset().union(*(self.roots(value) for value in _written(node)))

    def _roots_of(self, node: fx.Node) -> frozenset[fx.Node] | None:
        aliased = aliased_arguments(node)
        if len(aliased) == 1:
            return self.roots(aliased[0])
        if aliased:
            return frozenset().union(*(self.roots(value) for value in aliased))
        if node.target is operator.getitem and isinstance(node.args[1], int):
            source: Any = node.args[0]
            first = self._items.setdefault((source, node.args[1]), node)
            return None if first is node else self.roots(first)
        return None


class _SchemaFacts:
    """The facts of an operator's schema, cached because reading a schema is slow."""

    def __init__(self, target: OpOverload) -> None:
        schema = target._schema
        self.names = tuple(argument.name for argument in schema.arguments)
        infos = [argument.alias_info for argument in schema.arguments]
        returns = any(result.alias_info is not None for result in schema.returns)
        self.aliased = tuple(i for i, info in enumerate(infos) if info is not None and returns)
        self.written = tuple(i for i, info in enumerate(infos) if info is not None and info.is_write)
        self.is_mutable = bool(schema.is_mutable)
        self.is_random = torch.Tag.nondeterministic_seeded in target.tags
        self.dropout = self.names.index("dropout_p") if "dropout_p" in self.names else None
        if target is torch.ops.aten.native_dropout.default:
            self.dropout = self.names.index("p")
        self.returns_nothing = not schema.returns


_schema_facts = functools.cache(_SchemaFacts)


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    target = node.target
    if node.op != "call_function":
        return [] if node.op in ("placeholder", "get_attr") else _tensors(node)
    if isinstance(target, OpOverload):
        return _nodes_at(node, target, _schema_facts(target).aliased)
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        # One of several results. Each has its own memory, unless the operator returns views.
        source = node.args[0]
        fresh = isinstance(source.target, OpOverload) and not _schema_facts(source.target).aliased
        return [] if fresh else [source]
    return _tensors(node)  # higher-order operators, module calls


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that have memory: all except the graphs that a higher-order operator calls."""
    return [
        n
        for n in node.all_input_nodes
        if n.op != "get_attr" or not isinstance(attribute_of(n), fx.GraphModule)
    ]


def _written(node: fx.Node) -> list[fx.Node]:
    target = node.target
    return _nodes_at(node, target, _schema_facts(target).written) if isinstance(target, OpOverload) else []


def _nodes_at(node: fx.Node, target: OpOverload, positions: tuple[int, ...]) -> list[fx.Node]:
    """The nodes among the arguments at these schema positions."""
    found: list[fx.Node] = []
    for position in positions:
        value: Any = (
            node.args[position]
            if position < len(node.args)
            else node.kwargs.get(_schema_facts(target).names[position])
        )
        values = value if isinstance(value, (list, tuple)) else (value,)
        found.extend(v for v in values if isinstance(v, fx.Node))
    return found
