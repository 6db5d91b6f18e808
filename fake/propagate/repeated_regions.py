"""Regions that repeat in a graph: the layers of a model, forward and backward.

A region is a run of consecutive nodes that comes again, at once, with the same targets and constants, and with the
same wiring inside; where its nodes use values from outside, any values will do. :func:`find_regions` looks for them;
:class:`RegionSteps` says when one instance is like another, so that its values need not be computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fake.cache.symbolic import metadata_of
from fake.tensors.tensor import FakeTensor, Unkeyable

_SHORTEST = 4
"""Nodes below which a repetition is not worth its key."""
_PERIODS = 12
"""How many recurrences of a node are tried as the beginning of the next instance."""


@dataclass(frozen=True)
class Region:
    """``count`` instances of ``period`` nodes each, from the node number ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The number of the first node behind the last instance."""
        return self.start + self.period * self.count

    def instances(self, nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
        """The nodes of each instance."""
        for start in range(self.start, self.end, self.period):
            yield nodes[start : start + self.period]


def find_regions(nodes: Sequence[Node]) -> list[Region]:
    """The repeated regions of a graph, in order and without overlap.

    >>> import torch
    >>> def stack(x):
    ...     for _ in range(5):
    ...         x = (x.sin() + 1).cos() * 2
    ...     return x
    >>> find_regions(list(torch.fx.symbolic_trace(stack).graph.nodes))
    []
    >>> graph = torch.fx.experimental.proxy_tensor.make_fx(stack)(torch.ones(2))
    >>> find_regions(list(graph.graph.nodes))
    [Region(start=1, period=4, count=5)]
    """
    kinds = _kinds(nodes)
    next_of = _next_of_the_same(kinds)
    found: list[Region] = []
    position = 0
    while position < len(nodes):
        region = _longest_at(nodes, kinds, next_of, position)
        if region is None:
            position += 1
        else:
            found.append(region)
            position = region.end
    return found


def _kinds(nodes: Sequence[Node]) -> list[int]:
    """A number for each node: equal for equal targets and constants, negative where nothing may repeat."""
    numbers: dict[Any, int] = {}
    kinds = []
    for position, node in enumerate(nodes):
        kind = -1 - position
        if node.op == "call_function":
            try:
                shape = [node.target]
                shape += [Node if arg.__class__ is Node else _constants(arg) for arg in node._args]
                if node._kwargs:
                    shape.append(_constants(node._kwargs))
                kind = numbers.setdefault(tuple(shape), len(numbers))
            except TypeError:  # a constant that cannot be hashed
                pass
        kinds.append(kind)
    return kinds


def _constants(argument: Any) -> Any:
    """An argument with its nodes left out, and the types of numbers kept: 1 is not True."""
    kind = argument.__class__
    if kind is int or kind is float or kind is bool or kind is str:
        return (kind, argument)
    if kind is Node:
        return Node
    if isinstance(argument, (list, tuple)):
        return (list, *[_constants(item) for item in argument])
    if isinstance(argument, dict):
        return (dict, *[(name, _constants(item)) for name, item in argument.items()])
    if isinstance(argument, slice):
        return (slice, _constants(argument.start), _constants(argument.stop), _constants(argument.step))
    hash(argument)
    return (kind, argument)


def _next_of_the_same(kinds: list[int]) -> list[int]:
    """For each position the next one of the same kind, or a position behind the end."""
    following = [len(kinds)] * len(kinds)
    last: dict[int, int] = {}
    for position in range(len(kinds) - 1, -1, -1):
        following[position] = last.get(kinds[position], len(kinds))
        last[kinds[position]] = position
    return following


def _longest_at(nodes: Sequence[Node], kinds: list[int], next_of: list[int], start: int) -> Region | None:
    """The repetition from a position on that covers most nodes; the shortest period among equals."""
    best: Region | None = None
    again = next_of[start]
    for _ in range(_PERIODS):
        if again >= len(kinds) or (best is not None and again >= best.end):
            break
        period = again - start
        if period >= _SHORTEST:
            length = 0
            while again + length < len(kinds) and kinds[start + length] == kinds[again + length]:
                length += 1
            candidate = Region(start, period, length // period + 1)
            if candidate.count > 1 and (best is None or candidate.end > best.end):
                candidate = _with_equal_wiring(nodes, candidate)
                if candidate.count > 1 and (best is None or candidate.end > best.end):
                    best = candidate
        again = next_of[again]
    return best


def _with_equal_wiring(nodes: Sequence[Node], region: Region) -> Region:
    """The region cut off before the first instance whose nodes use each other in another way."""
    wiring = None
    for number, instance in enumerate(region.instances(nodes)):
        index = {node: position for position, node in enumerate(instance)}
        own = [index.get(used, -1) for node in instance for used in _uses(node)]
        if wiring is not None and own != wiring:  # equal constants: as many uses for each node
            return Region(region.start, region.period, number)
        wiring = own
    return region


def _uses(node: Node) -> list[Node]:
    """The nodes among the arguments, in order and with repetitions."""
    if not node._kwargs and not any(isinstance(arg, (list, tuple, dict, slice)) for arg in node._args):
        return [arg for arg in node._args if arg.__class__ is Node]  # type: ignore[misc]
    used: list[Node] = []
    torch.fx.node.map_arg((node._args, node._kwargs), used.append)
    return used


class RegionSteps:
    """The steps that make the values of one region's instances, as found for those before.

    Attributes:
        steps: for each key, how to make the value of each node.
    """

    def __init__(self) -> None:
        self.steps: dict[Any, list[Any]] = {}

    @staticmethod
    def key(instance: Sequence[Node], values: dict[Node, Any]) -> Any:
        """Returns what decides the values of an instance: all that it uses from outside, and which uses are of one value.

        None if something outside has no key.
        """
        inside = set(instance)
        numbers: dict[Node, int] = {}
        uses: list[int] = []
        outside: list[Any] = []
        for node in instance:
            for used in _uses(node):
                if used in inside:
                    continue
                number = numbers.get(used)
                if number is None:
                    number = numbers[used] = len(numbers)
                    try:
                        outside.append(_value_key(values[used]))
                    except (Unkeyable, KeyError):
                        return None
                uses.append(number)
        return (tuple(uses), tuple(outside))


def _value_key(value: Any) -> Any:
    if type(value) is FakeTensor:
        metadata = value._interned or metadata_of(value)
        if value._interned is None or value.is_neg():
            raise Unkeyable("a tensor whose flags may change")
        return (metadata, value.untyped_storage().nbytes(), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), *[_value_key(item) for item in value])
    if value is None or isinstance(value, (int, float, bool, complex, str, torch.dtype, torch.device)):
        return (type(value), value)
    raise Unkeyable("a value of another type")
