"""Several processes as one graph: exact arithmetic evaluates calls, and waits for nobody.

:class:`~fxpasses.checking.interpret.Run` runs a graph with collectives as several processes, in floats. Here the same processes stand side
by side in one graph: each call once for each process, and for a collective what :mod:`~fxpasses.checking.collectives` says that it answers,
as calls of ATen operators. What the first process returns is what the graph returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.dispatch.communication import communicates
from fake.seam.pytree import tree_flatten, tree_map, tree_unflatten
from fxpasses._torch import trace_calls
from fxpasses.checking.collectives import answers, collectives, differs_by_process, processes, refuse_unknown
from fxpasses.checking.fake_values import propagate_fakes
from fxpasses.checking.inputs import Unsupported, made_up
from fxpasses.exact import Finding, Original, Verdict
from fxpasses.exact.same_values import Comparison
from fxpasses.graphs.rewriting import copy_graph, value_of


class SideBySide:
    """A graph that others are compared with exactly, collectives or not: :class:`fxpasses.exact.Original`.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``; it is not changed.
        inputs: example inputs: tensors with data, and sizes.

    Raises:
        ValueError: the graph takes another number of inputs.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)
        self._others = 0
        if any(collectives(gm)):
            self._others = processes(gm) - 1
            self._own = [
                isinstance(value, Tensor) and differs_by_process(node)
                for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
            ]
        self._gm = gm
        self._original: Original | None = None

    def equivalent(self, after: fx.GraphModule, **options: Any) -> Verdict:
        """The verdict on a graph that is to stand in the place of this one: ``UNPROVED`` if what a collective answers cannot be made up.

        Args: those of :meth:`fxpasses.exact.Original.equivalent`.

        Raises:
            ValueError: the graph takes another number of inputs.
        """
        try:
            if self._original is None:
                self._original = Original(self._as_one(self._gm), self._all_inputs())
            one = self._as_one(after)
        except Unsupported as error:
            finding = Finding("example", "the graph", Comparison("unproved", reason=str(error)))
            return Verdict("UNPROVED", finding)
        return self._original.equivalent(one, **options)

    def _all_inputs(self) -> list[Any]:
        found = list(self._inputs)
        for number in range(self._others):
            own = [value for value, is_own in zip(self._inputs, self._own, strict=True) if is_own]
            found += made_up(own, "random", torch.Generator().manual_seed(1 + number))
        return found

    def _as_one(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self._others:
            return gm
        refuse_unknown(gm)
        gm = copy_graph(gm)
        propagate_fakes(gm, self._inputs, dynamic=False)  # each process has the sizes of the example
        whole = fx.GraphModule(gm, self._beside(gm))
        propagate_fakes(whole, self._all_inputs(), dynamic=False)
        return whole

    def _beside(self, gm: fx.GraphModule) -> fx.Graph:
        graph = fx.Graph()
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self._others + 1)]
        given = gm.graph.find_nodes(op="placeholder")
        for number, env in enumerate(envs):
            for node, is_own in zip(given, self._own, strict=True):
                is_new = is_own or not number
                env[node] = graph.placeholder(_name(node, number)) if is_new else envs[0][node]
        for node in gm.graph.nodes:
            if node.op == "output":
                graph.node_copy(node, envs[0].__getitem__)
            elif node.op == "get_attr":
                held = graph.node_copy(node)
                for env in envs:
                    env[node] = held
            elif node.op != "placeholder" and communicates(node.target):
                for env, answer in zip(envs, _answered(graph, node, envs), strict=True):
                    env[node] = answer
            elif node.op != "placeholder":
                for number, env in enumerate(envs):
                    env[node] = _copied(graph, node, env, _name(node, number))
        return graph


def _name(node: fx.Node, process: int) -> str:
    return f"{node.name}_of_process_{process}" if process else node.name


def _copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any], name: str) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    return graph.create_node(node.op, node.target, args, kwargs, name)


def _answered(graph: fx.Graph, node: fx.Node, envs: Sequence[Mapping[fx.Node, Any]]) -> list[Any]:
    """What a collective answers in each process: a node of the graph, or a list of them."""
    flat, spec = tree_flatten((node.args, node.kwargs))
    given = [value for value in flat if isinstance(value, fx.Node)]

    def answer(*values: Any) -> tuple[Any, ...]:
        left = iter(values)
        calls = [[next(left) if isinstance(x, fx.Node) else x for x in flat] for _ in envs]
        return tuple(answers(node.target, [tree_unflatten(call, spec) for call in calls]))

    # Values of their own: the same one twice would be one input.
    fakes = [
        tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value_of(value))
        for _ in envs
        for value in given
    ]
    model = trace_calls(answer, fakes, {}, guards=False)
    made: dict[fx.Node, Any] = {}
    held = iter([env[value] for env in envs for value in given])
    for inner in model.graph.nodes:
        if inner.op == "placeholder":
            made[inner] = next(held)
        elif inner.op == "output":
            return list(fx.map_arg(inner.args[0], made.__getitem__))
        else:
            made[inner] = _copied(graph, inner, made, f"{node.name}_{inner.name}")
    raise AssertionError("a graph has an output")
