"""Trace the parameter gathers of equal layers once.

The calls that gather a layer's parameters stay outside of its region (:mod:`.parameters`), where passes see
them. But AOTAutograd traces each collective several times, and its gradient. So while AOTAutograd traces, the
calls in front of each layer are one operator. Before the first pass runs, it is replaced by the graph that
equal calls were traced to.

::

    Dynamo graph    redistribute, to_local, redistribute, to_local, ..., region(layer), redistribute, ...
    traced          region_forward(gathers), region_forward(layer), region_forward(gathers), ...
    inlined         all_gather, wait, all_gather, wait, ..., region_forward(layer), all_gather, ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.compiling.graph_compilers import EagerCompiler
from fxpasses.graphs.rewriting import compute_value, copy_graph, fake_mode_of, outputs_of
from fxpasses.regional._torch import storage_of
from fxpasses.regional.facts import is_call, read_facts, wiring
from fxpasses.regional.parameters import gathered_parameters
from fxpasses.regional.region_operators import inlined_graph
from fxpasses.regional.region_search import Search, Subgraph

_MIN_CALLS_SAVED = 16
"""Minimum number of calls not traced again, from which on an operator pays off."""
_VALUE_METADATA = ("val", "tensor_meta", "eager_input_vals")
"""Metadata that describes a node's own value."""


def equal_gathers(gm: fx.GraphModule) -> tuple[Search, list[list[Subgraph]]]:
    """Group equal runs of calls in front of layers that gather parameters, as subgraphs of a graph's gathers.

    Args:
        gm: a Dynamo graph that calls regions.
    """
    own = gathered_parameters(gm.graph)
    runs: list[list[fx.Node]] = [[]]
    for node in filter(is_call, gm.graph.nodes):
        if node in own:
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    facts = read_facts(gm, [node for run in runs for node in run])
    groups: dict[object, list[Subgraph]] = defaultdict(list)
    start = 0
    for run in runs:
        stop = start + len(run)
        if run and not any(facts.barriers[start:stop]):
            groups[tuple(facts.tokens[start:stop]), wiring(facts, start, stop)[0]].append(
                Subgraph(start, stop)
            )
        start = stop
    return Search(facts), [
        group
        for group in groups.values()
        if (len(group) - 1) * (group[0].stop - group[0].start) >= _MIN_CALLS_SAVED
    ]


class KeptGraphs(EagerCompiler):
    """Keeps the graphs that gathers were traced to. They are never called."""

    graphs: dict[str, fx.Graph]

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Keep a forward graph, replacing earlier graphs. Args: those of :meth:`Compiler.forward`."""
        self.graphs = {"forward": _without_views(copy_graph(gm).graph)}
        return super().forward(gm, inputs, inference=inference, visible=visible)

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs["backward"] = _without_views(copy_graph(gm).graph)
        return super().backward(gm, inputs)


def _without_views(graph: fx.Graph) -> fx.Graph:
    """Remove no-op views left over from wrapping local tensors in DTensors."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        base = node.all_input_nodes[0]
        if node.meta["val"].shape == base.meta["val"].shape:
            node.replace_all_uses_with(base)
            graph.erase_node(node)
    return graph


def inline_gathers(gm: fx.GraphModule) -> None:
    """Replace operators that stand for gathers by their graphs.

    Args:
        gm: a joint graph or an inference graph, right after tracing.
    """
    calls = [(node, inner) for node in gm.graph.nodes if (inner := inlined_graph(node)) is not None]
    mode = fake_mode_of(gm.graph) if calls else None
    for call, inner in calls:
        values: dict[fx.Node, Any] = dict(
            zip(inner.find_nodes(op="placeholder"), call.args[1], strict=True)  # type: ignore[arg-type]
        )
        shared = {name: value for name, value in call.meta.items() if name not in _VALUE_METADATA}
        with gm.graph.inserting_before(call):
            for node in inner.nodes:
                if node.op == "call_function":
                    values[node] = made = gm.graph.node_copy(node, values.__getitem__)
                    made.meta = {**shared, "val": _value_like(node, made, mode)}
        results = outputs_of(inner)
        for item in list(call.users):
            item.replace_all_uses_with(values[results[item.args[1]]])  # type: ignore[index]
            gm.graph.erase_node(item)
        gm.graph.erase_node(call)
    if calls:
        gm.recompile()


def _value_like(node: fx.Node, made: fx.Node, mode: Any) -> Any:
    """Compute the fake value of a copied node: with its own memory or as a view, like the original."""
    value = node.meta["val"]
    inputs = [other.meta["val"] for other in node.all_input_nodes]
    if not isinstance(value, torch.Tensor) or storage_of(value) in map(storage_of, inputs):
        return compute_value(made, mode)
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
