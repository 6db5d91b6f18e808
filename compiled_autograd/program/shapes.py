"""Find which sizes change between calls, and make a segment in which only those are symbolic.

Two or more calls show which lifted sizes and which tensor dimensions are constant and which vary. Those with
equal values in all calls are assumed equal. Each later call is compared with that pattern before the compiled
code is used.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd.runtime.executing import graph_module


@dataclasses.dataclass(frozen=True)
class Observation:
    """All sizes of one call."""

    sizes: tuple[int, ...]
    scalars: tuple[Any, ...]
    shapes: tuple[tuple[int, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class ShapePattern:
    """Which sizes are constant and which vary."""

    calls: tuple[Observation, ...]
    """The calls from which the pattern was inferred."""
    varying_sizes: tuple[int, ...]
    """Indices into ``sizes``."""
    dynamic_dims: tuple[tuple[int, int], ...]
    """(tensor, dimension) pairs."""
    sources: dict[int, tuple[int, int] | None]
    """Per varying size, a dimension that is always equal to it, or None."""
    equal: tuple[tuple[Any, Any], ...]
    """Pairs of dimensions or sizes that were equal in all calls."""

    @property
    def fixed(self) -> Observation:
        """The first call."""
        return self.calls[0]

    @staticmethod
    def observe(values: Sequence[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> Observation:
        """Record the sizes of one call.

        Args:
            values: a tensor or None for each input of the segment.
            sizes: the graph's sizes.
            scalars: the graph's scalars.
        """
        shapes = tuple(None if value is None else tuple(value.shape) for value in values)
        return Observation(tuple(sizes), tuple(scalars), shapes)

    @classmethod
    def of(cls, calls: Sequence[Observation]) -> "ShapePattern | None":
        """Return the pattern of these calls, or None if more than sizes differs, or nothing does."""
        first = calls[0]
        ranks = [[None if shape is None else len(shape) for shape in call.shapes] for call in calls]
        if any(call.scalars != first.scalars for call in calls) or any(found != ranks[0] for found in ranks):
            return None
        groups: dict[tuple[int, ...], list[Any]] = {}
        dims: list[tuple[int, int]] = []
        for position, shape in enumerate(first.shapes):
            for dim in range(len(shape or ())):
                seen = tuple(call.shapes[position][dim] for call in calls)  # type: ignore[index]
                if len(set(seen)) > 1:
                    if min(seen) < 2:  # compilers treat 0 and 1 as constants
                        return None
                    dims.append((position, dim))
                    groups.setdefault(seen, []).append((position, dim))
        varying: list[int] = []
        sources: dict[int, tuple[int, int] | None] = {}
        for index, seen in enumerate(zip(*(call.sizes for call in calls), strict=True)):
            if len(set(seen)) > 1:
                varying.append(index)
                members = groups.setdefault(seen, [])
                sources[index] = next((member for member in members if isinstance(member, tuple)), None)
                if sources[index] is None and min(seen) < 2:
                    return None
                members.append(index)
        if not groups:
            return None
        equal = tuple((members[0], other) for members in groups.values() for other in members[1:])
        return cls(tuple(calls), tuple(varying), tuple(dims), sources, equal)

    def matches(self, values: Sequence[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> bool:
        """Whether a call has this pattern.

        Args:
            values: a tensor or None for each input of the segment.
            sizes: the graph's sizes.
            scalars: the graph's scalars.
        """
        if tuple(scalars) != self.fixed.scalars:
            return False
        varying = set(self.varying_sizes)
        for index, (size, fixed) in enumerate(zip(sizes, self.fixed.sizes, strict=True)):
            if size != fixed and (index not in varying or size < 2):
                return False
        dynamic = set(self.dynamic_dims)
        for position, (value, shape) in enumerate(zip(values, self.fixed.shapes, strict=True)):
            if value is None or shape is None:
                if value is not shape:
                    return False
            elif tuple(value.shape) != shape:
                if value.dim() != len(shape):
                    return False
                for dim, (size, fixed) in enumerate(zip(value.shape, shape, strict=True)):
                    if size != fixed and ((position, dim) not in dynamic or size < 2):
                        return False
        return all(
            _size_at(left, values, sizes) == _size_at(right, values, sizes) for left, right in self.equal
        )


def _size_at(position: Any, values: Sequence[Any], sizes: Sequence[int]) -> int:
    return sizes[position] if isinstance(position, int) else values[position[0]].shape[position[1]]


def dynamic_module(module: fx.GraphModule, pattern: ShapePattern) -> tuple[fx.GraphModule, list[int]]:
    """Specialize a segment's module to this pattern. Return it and which sizes ``carriers`` holds.

    The module takes (values, carriers). Sizes and scalars that did not vary become constants, and sizes that
    equal a dimension are read from it. Each other size is passed as the second dimension of an empty tensor,
    because Inductor loses integers that are passed beside a list of tensors.
    """
    graph = fx.Graph()
    values, carriers = graph.placeholder("values"), graph.placeholder("carriers")
    env: dict[fx.Node, Any] = {}
    tensors: list[fx.Node] = []
    carried: list[int] = []
    originals = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.target is operator.getitem and node.args[0] is originals["values"]:
            env[node] = graph.create_node(
                "call_function", operator.getitem, (values, node.args[1]), name=node.name
            )
            tensors.append(env[node])
        elif node.op == "call_method" and node.target == "clear":
            continue  # the compiled code takes over the list
        elif node.target is operator.getitem and node.args[0] is originals["scalars"]:
            env[node] = pattern.fixed.scalars[node.args[1]]
        elif node.target is operator.getitem and node.args[0] is originals["sizes"]:
            index = node.args[1]
            if index not in pattern.sources:
                env[node] = pattern.fixed.sizes[index]
            elif (source := pattern.sources[index]) is not None:
                env[node] = graph.create_node(
                    "call_function",
                    torch.ops.aten.sym_size.int,
                    (tensors[source[0]], source[1]),
                    name=node.name,
                )
            else:
                element = (carriers, len(carried))
                carrier = graph.create_node(
                    "call_function", operator.getitem, element, name=f"{node.name}_carrier"
                )
                env[node] = graph.create_node(
                    "call_function", torch.ops.aten.sym_size.int, (carrier, 1), name=node.name
                )
                carried.append(index)
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif (
            not any(isinstance(env[used], fx.Node) for used in node.all_input_nodes) and node.all_input_nodes
        ):
            # Fold arithmetic on constants.
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            env[node].meta.update(node.meta)
    return graph_module(module, graph, f"{module._get_name()}Dynamic"), carried
