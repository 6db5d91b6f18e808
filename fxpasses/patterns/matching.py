"""Find a traced pattern in a graph: the search behind :mod:`fxpasses.patterns`.

A pattern is a graph, traced from a Python function. Its placeholders match anything, and its calls match
calls of the same operator. Sizes in its arguments depend on the shapes that it was traced with, so the search
has two steps. First, integers match any integers. Then the function is traced again with the metadata of what
was found, and integers must be equal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fxpasses.graphs.rewriting import same_size, value_of

aten = torch.ops.aten

_COMMUTATIVE = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
}

Binding = dict[fx.Node, Any]
"""Maps pattern nodes to nodes of the graph, or to constants for numbers that the pattern leaves open."""


Numbers = dict[tuple[type, Any], fx.Node]
"""The placeholder of each number that a pattern leaves open, by the type and value it was traced with."""


def find_matches(
    outputs: Sequence[fx.Node],
    graph: fx.Graph,
    anchor: fx.Node,
    numbers: Numbers,
    known: Binding | None = None,
) -> Iterator[Binding]:
    """Yield every way in which a pattern with these outputs matches with ``anchor`` as its first output.

    Args:
        outputs: the pattern's output nodes.
        graph: the graph to search.
        anchor: the node that the first output must match.
        numbers: the numbers that the pattern leaves open.
        known: the values of the placeholders. If given, integers must be equal.
    """
    matcher = _Matcher(numbers, exact=known is not None)
    yield from _find_outputs(matcher, list(outputs), graph, anchor, dict(known or {}))


def _find_outputs(
    matcher: _Matcher, outputs: list[fx.Node], graph: fx.Graph, anchor: fx.Node | None, binding: Binding
) -> Iterator[Binding]:
    if not outputs:
        yield binding
        return
    first, *rest = outputs
    if first in binding:
        candidates = [binding[first]]
    elif anchor is not None:
        candidates = [anchor]
    else:
        taken = {node for node in binding.values() if isinstance(node, fx.Node)}
        candidates = [
            node for node in graph.find_nodes(op="call_function", target=first.target) if node not in taken
        ]
    for candidate in candidates:
        for extended in matcher.match(first, candidate, binding):
            yield from _find_outputs(matcher, rest, graph, None, extended)


class _Matcher:
    """Extends bindings. Each alternative is a separate binding."""

    def __init__(self, numbers: Numbers, exact: bool) -> None:
        self.numbers = numbers
        self.exact = exact

    def match(self, pattern: Any, actual: Any, binding: Binding) -> Iterator[Binding]:
        """Match one argument.

        Args:
            pattern: a node of the pattern, a constant, or a list of such.
            actual: the corresponding argument in the graph.
            binding: what the earlier pattern nodes matched.

        Yields:
            The binding extended by this argument's nodes, once per way in which it matches.
        """
        if isinstance(pattern, fx.Node):
            yield from self._match_node(pattern, actual, binding)
        elif isinstance(pattern, (list, tuple)):
            if isinstance(actual, (list, tuple)) and len(actual) == len(pattern):
                yield from self._match_all(list(zip(pattern, actual, strict=True)), binding)
        elif _is_number(actual) and (open_number := self.numbers.get(number_key(pattern))) is not None:
            yield from self._bind(open_number, actual, binding)
        elif self._equal(pattern, actual):
            yield binding

    def _match_node(self, pattern: fx.Node, actual: Any, binding: Binding) -> Iterator[Binding]:
        if pattern in binding or pattern.op == "placeholder":
            yield from self._bind(pattern, actual, binding)
            return
        if _is_number(value_of(pattern)):  # a size that is computed from sizes of the inputs
            if (not self.exact and _is_integer(actual)) or self._equal(value_of(pattern), actual):
                yield binding
            return
        if not isinstance(actual, fx.Node) or actual.op != pattern.op or actual.target != pattern.target:
            return
        if any(value is actual for key, value in binding.items() if key.op != "placeholder"):
            return  # two calls of the pattern must match two calls of the graph
        binding = {**binding, pattern: actual}
        wanted, given = call_arguments(pattern), call_arguments(actual)
        if len(wanted) != len(given):
            return
        if pattern.target is operator.getitem:
            if wanted[1] == given[1]:
                yield from self.match(wanted[0], given[0], binding)
            return
        yield from self._match_all(list(zip(wanted, given, strict=True)), binding)
        if pattern.target in _COMMUTATIVE and all(a in (1, None) for a in wanted[2:]):
            swapped = [given[1], given[0], *given[2:]]
            yield from self._match_all(list(zip(wanted, swapped, strict=True)), binding)

    def _match_all(self, pairs: list[tuple[Any, Any]], binding: Binding) -> Iterator[Binding]:
        if not pairs:
            yield binding
            return
        (pattern, actual), *rest = pairs
        for extended in self.match(pattern, actual, binding):
            yield from self._match_all(rest, extended)

    def _bind(self, pattern: fx.Node, actual: Any, binding: Binding) -> Iterator[Binding]:
        if pattern in binding:
            same = binding[pattern] is actual or (
                not isinstance(actual, fx.Node) and self._equal(binding[pattern], actual)
            )
            if same:
                yield binding
        elif isinstance(actual, fx.Node) or _is_number(actual):
            yield {**binding, pattern: actual}

    def _equal(self, pattern: Any, actual: Any) -> bool:
        """Whether two constants are equal. Integers need only be equal in an exact match."""
        if isinstance(actual, fx.Node):
            actual = value_of(actual)
        if _is_integer(pattern) and _is_integer(actual):
            return not self.exact or same_size(pattern, actual)
        if type(pattern) in (int, float) and type(actual) in (int, float):
            return pattern == actual or (pattern != pattern and actual != actual)  # NaN is NaN here
        return type(pattern) is type(actual) and bool(pattern == actual)


def call_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments of a call in schema order, with defaults filled in."""
    if not isinstance(node.target, OpOverload):
        return [*node.args, *(node.kwargs[key] for key in sorted(node.kwargs))]
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            found.append(node.args[position])
        else:
            found.append(node.kwargs.get(argument.name, argument.default_value))
    return found


def number_key(constant: Any) -> tuple[type, Any]:
    """Return a lookup key with the number's type. Other constants (lists are unhashable) never match one."""
    return (type(constant), constant if type(constant) in (int, float) else None)


def _is_integer(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value_of(value)
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value_of(value)
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
