"""Outputs whose memory is nobody else's stay that, whatever Inductor's passes do with the calls that made them.

``x * 1`` is new memory, and whoever calls the graph may write to it. To the graph itself it is ``x``: Inductor drops the multiplication, and a
write to the output then changes the input. The same holds for two copies of one value. (A pass of ours or of a user that does this is an
error: see ``pass_manager.structure``.)
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fxpasses.graphs.aliasing import aliased_arguments

aten = torch.ops.aten

_META = "fresh_outputs"
"""Where the output node says which of them they are."""


def mark_fresh_outputs(graph: fx.Graph, count: int | None = None) -> None:
    """Note on the output node which of its first ``count`` values (all by default) lie in memory that neither an input nor another of them has."""
    bases = _bases(graph)[:count]
    shared = Counter(bases)
    graph.output_node().meta[_META] = [
        i
        for i, base in enumerate(bases)
        if base is not None and base.op == "call_function" and shared[base] == 1
    ]


def hand_fresh_outputs_on(joint: fx.Graph, forward: fx.Graph) -> None:
    """What was noted on a joint graph holds for the forward graph: its first outputs are the same."""
    forward.output_node().meta[_META] = joint.output_node().meta[_META]


def keep_outputs_fresh(graph: fx.Graph) -> None:
    """Copy each output that was noted as fresh and has come to lie in the memory of an input or of another output that was."""
    output = graph.output_node()
    bases, outputs = _bases(graph), list(output.args[0])  # type: ignore[arg-type]
    fresh = output.meta.get(_META, ())
    taken: set[fx.Node] = set()
    for i in fresh:
        base = bases[i]
        if base is None:
            continue
        if base.op == "call_function" and base not in taken:
            taken.add(base)
            continue
        with graph.inserting_before(output):
            copied = graph.call_function(aten.clone.default, (outputs[i],))
        value = outputs[i].meta["val"]
        with value.fake_mode:
            copied.meta = {**outputs[i].meta, "val": value.clone()}
        outputs[i] = copied
    output.args = (tuple(outputs),)


def _bases(graph: fx.Graph) -> list[fx.Node | None]:
    """For each output whose memory it has; ``None`` for one that is no tensor."""
    return [
        _base(value)
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        else None
        for value in graph.output_node().args[0]  # type: ignore[union-attr]
    ]


def _base(node: fx.Node) -> fx.Node:
    """The value that a chain of views begins with. What an operator without a schema returns counts as its own."""
    while True:
        source = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(source, fx.Node) and isinstance(source.target, OpOverload)):
            return node
        aliased = aliased_arguments(node)
        if not aliased:
            return node
        node = aliased[0]
