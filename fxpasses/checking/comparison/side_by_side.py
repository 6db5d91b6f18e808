"""Several processes as one graph: exact arithmetic evaluates calls, and waits for no other process.

:class:`~fxpasses.checking.execution.interpret.Run` runs a graph with collectives as several processes, in floats. Here
the same processes are side by side in one graph: each call once per process, and for a collective what
:mod:`~fxpasses.checking.execution.collectives` computes, as calls of ATen operators. The graph returns what the first
process returns.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fake import FakeTensorMode
from fake.dispatch.communication import communicates
from fake.seam.dispatch import has_symbols
from fake.seam.pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from fxpasses._torch import trace_calls
from fxpasses.checking.execution.collectives import (
    Group,
    collectives,
    count_processes,
    differs_by_process,
    group_of,
    named_arguments,
    refuse_unknown,
    simulate_collective,
)
from fxpasses.checking.execution.fake_values import propagate_fakes
from fxpasses.checking.execution.inputs import Unsupported, made_up
from fxpasses.exact import Finding, Original, Verdict
from fxpasses.exact.same_values import Comparison
from fxpasses.graphs.rewriting import copy_graph, outputs_of, value_of


class SideBySide:
    """A graph to compare others with exactly, even with collectives: see :class:`fxpasses.exact.Original`.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``; not mutated.
        inputs: example inputs: tensors with data, and sizes.

    Raises:
        ValueError: the graph takes a different number of inputs.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)
        self._others = 0
        if any(collectives(gm)):
            self._others = count_processes(gm) - 1
            self._differs = [
                isinstance(value, Tensor) and differs_by_process(node)
                for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
            ]
        self._gm = gm
        self._original: Original | None = None

    def equivalent(self, after: fx.GraphModule, **options: Any) -> Verdict:
        """Return the verdict on a replacement: ``UNPROVED`` if a collective cannot be simulated.

        Args: those of :meth:`fxpasses.exact.Original.equivalent`.

        Raises:
            ValueError: the graph takes a different number of inputs.
        """
        try:
            if self._original is None:
                self._original = Original(self._merge_processes(self._gm), self._all_inputs())
            one = self._merge_processes(after)
        except Unsupported as error:
            finding = Finding("example", "the graph", Comparison("unproved", reason=str(error)))
            return Verdict("UNPROVED", finding)
        return self._original.equivalent(one, **options)

    def _all_inputs(self) -> list[Any]:
        found = list(self._inputs)
        for number in range(self._others):
            own = [value for value, is_own in zip(self._inputs, self._differs, strict=True) if is_own]
            found += made_up(own, "random", torch.Generator().manual_seed(1 + number))
        return found

    def _merge_processes(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self._others:
            return gm
        refuse_unknown(gm)
        if any(isinstance(v, Tensor) and has_symbols(v) for v in map(value_of, gm.graph.nodes)):
            gm = copy_graph(gm)
            propagate_fakes(gm, self._inputs, dynamic=False)  # each process has the sizes of the example
        return fx.GraphModule(gm, self._merged_graph(gm))

    def _merged_graph(self, gm: fx.GraphModule) -> fx.Graph:
        graph = fx.Graph()
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self._others + 1)]
        given = gm.graph.find_nodes(op="placeholder")
        for number, env in enumerate(envs):
            for node, is_own in zip(given, self._differs, strict=True):
                is_new = is_own or not number
                env[node] = _copied(graph, node, env, _name(node, number)) if is_new else envs[0][node]
        for node in gm.graph.nodes:
            if node.op == "output":
                graph.node_copy(node, envs[0].__getitem__)
            elif node.op == "get_attr":
                held = _copied(graph, node, {}, node.name)
                for env in envs:
                    env[node] = held
            elif node.op != "placeholder" and communicates(node.target):
                for env, answer in zip(envs, _inline_collective(graph, node, envs), strict=True):
                    env[node] = answer
            elif node.target is operator.getitem and isinstance(envs[0][node.args[0]], (list, tuple)):
                for env in envs:
                    env[node] = env[node.args[0]][node.args[1]]
            elif node.op != "placeholder":
                for number, env in enumerate(envs):
                    env[node] = _copied(graph, node, env, _name(node, number))
        return graph


def _name(node: fx.Node, process: int) -> str:
    return f"{node.name}_of_process_{process}" if process else node.name


def _copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any], name: str) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    target = name if node.op == "placeholder" else node.target
    copied = graph.create_node(node.op, target, args, kwargs, name)
    copied.meta = {**node.meta}
    return copied


@dataclass(frozen=True)
class _TensorMetadata:
    """The metadata of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _inline_collective(graph: fx.Graph, node: fx.Node, envs: Sequence[Mapping[fx.Node, Any]]) -> list[Any]:
    """The result of a collective in each process: a node of the graph, or a list of them."""
    calls = [fx.map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
    flat, spec = tree_flatten(calls[0])
    group = group_of(named_arguments(node), len(envs))
    model = _trace_collective(node.target, tuple(map(_metadata_or_value, flat)), spec, group)
    held = iter(
        [x for call in calls for x in tree_leaves(call) if isinstance(_metadata_or_value(x), _TensorMetadata)]
    )
    made: dict[fx.Node, Any] = {}
    for inner in model.graph.nodes:
        if inner.op == "placeholder":
            made[inner] = next(held)
        elif inner.op != "output":
            made[inner] = _copied(graph, inner, made, f"{node.name}_{inner.name}")
    return list(fx.map_arg(tuple(outputs_of(model.graph)), made.__getitem__))


def _metadata_or_value(argument: Any) -> Any:
    """An argument of a collective: the metadata of a tensor, or any other value."""
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, Tensor):
        return _TensorMetadata(tuple(value.shape), value.stride(), value.dtype, value.device)
    return value


@functools.lru_cache(maxsize=256)
def _trace_collective(
    target: Any, arguments: tuple[Any, ...], spec: TreeSpec, group: Group
) -> fx.GraphModule:
    """The results of a collective in several processes, as a graph of what they send."""
    tensors = [x for _ in range(group.count) for x in arguments if isinstance(x, _TensorMetadata)]
    with FakeTensorMode():
        # Separate values: the same one twice would be one input.
        sent = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=x.device) for x in tensors]

    def answer(*values: Any) -> tuple[Any, ...]:
        left = iter(values)
        calls = [
            [next(left) if isinstance(x, _TensorMetadata) else x for x in arguments]
            for _ in range(group.count)
        ]
        return tuple(simulate_collective(target, [tree_unflatten(call, spec) for call in calls]))

    return trace_calls(answer, sent, {}, guards=False)
