"""Turn values inside two graphs, such as a window's inputs, into inputs of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.same_function import Difference, Rewriting
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.free_values import is_free, is_independent
from fxpasses.checking.execution.interpret import as_recorded_dtype
from fxpasses.graphs.rewriting import copy_graph, value_of


@dataclass(frozen=True)
class Counterexample:
    """Two graphs, and inputs on which they differ.

    Attributes:
        before: the graph before, perhaps with further inputs at the end.
        after: the graph after, likewise.
        inputs: of both.
        differences: values that differ there; none if only precision is lost, or results become non-finite.
        where: what the inputs are, in words.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    inputs: list[Any]
    differences: list[Difference]
    where: str


def input_names(window: Window) -> list[str]:
    """Return the names of a window's inputs."""
    return [node.name for node in window.before.graph.find_nodes(op="placeholder")]


def is_float64_tensor(value: Any) -> bool:
    """Whether it is a non-empty float64 tensor."""
    return isinstance(value, Tensor) and value.dtype is torch.float64 and value.numel() > 0


def free_inputs(rewriting: Rewriting, given: Mapping[str, Any], only_graph_inputs: bool) -> list[str]:
    """Return the inputs of a window that may be any floats, whatever the others are.

    Args:
        rewriting: the graphs.
        given: the inputs in float64, by name.
        only_graph_inputs: whether only inputs of the graph may be.
    """
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    taken = {nodes[name] for name in given}
    return [
        name
        for name, value in given.items()
        if is_float64_tensor(value)
        and name in others
        and (
            nodes[name].op == "placeholder"
            or (
                not only_graph_inputs
                and is_free(nodes[name])
                and all(is_independent(nodes[name], other) for other in taken)
            )
        )
    ]


def with_values_as_inputs(
    rewriting: Rewriting, values: Mapping[str, Tensor], where: str, after: Mapping[str, str] | None = None
) -> Counterexample:
    """Return both graphs, with float64 values of the graph before as inputs.

    Args:
        rewriting: the graphs.
        values: the values, by name.
        where: what the values are, in words.
        after: the graph after's name of a value, if it differs.
    """
    nodes = rewriting.before.graph.find_nodes(op="placeholder")
    inputs = [values.get(n.name, value) for n, value in zip(nodes, rewriting.inputs, strict=True)]
    inside = [name for name in values if name not in {n.name for n in nodes}]
    before = _with_extra_inputs(rewriting.before, inside)
    changed = _with_extra_inputs(rewriting.after, [(after or {}).get(name, name) for name in inside])
    inputs += [values[name] for name in inside]
    examples = map(value_of, before.graph.find_nodes(op="placeholder"))
    inputs = [as_recorded_dtype(v, example) for v, example in zip(inputs, examples, strict=True)]
    names = "inputs" if not inside else f"{', '.join(inside)}, taken for inputs,"
    return Counterexample(before, changed, inputs, [], f"{names} {where}")


def _with_extra_inputs(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Copy the graph with some of its values as further inputs."""
    if not names:
        return gm
    copy = copy_graph(gm)
    nodes = {node.name: node for node in copy.graph.nodes}
    *_, last = copy.graph.find_nodes(op="placeholder")
    for name in names:
        with copy.graph.inserting_after(last):
            last = copy.graph.placeholder(f"{name}_given")
        last.meta = {"val": value_of(nodes[name]), "is_cut": True}
        nodes[name].replace_all_uses_with(last)
    copy.recompile()
    return copy
