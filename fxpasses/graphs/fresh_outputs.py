"""Outputs whose memory is nobody else's stay that, whatever Inductor's passes do with the calls that made them.

``x * 1`` is new memory, and whoever calls the graph may write to it. To the graph itself it is ``x``: Inductor drops the multiplication, and a
write to the output then changes the input. The same holds for two copies of one value. (A pass of ours or of a user that does this is an
error: see ``pass_manager.structure``.)
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fake.seam.fx import detect_fake_mode
from fxpasses.graphs.aliasing import aliased_arguments
from fxpasses.graphs.rewriting import attribute_of, outputs_of

aten = torch.ops.aten

_META = "fresh_outputs"
"""Where the output node says which of them they are."""


def mark_fresh_outputs(graph: fx.Graph, count: int | None = None) -> None:
    """Note on the output node which of its first ``count`` values (all by default) lie in memory that no input has, and which of them in the same."""
    graph.output_node().meta[_META] = {
        i: base.name
        for i, base in enumerate(_bases(graph)[:count])
        if base is not None and base.op == "call_function"
    }
    for control_flow in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
        for node in graph.find_nodes(op="call_function", target=control_flow):
            for source in node.all_input_nodes:
                branch = attribute_of(source) if source.op == "get_attr" else None
                if isinstance(branch, fx.GraphModule):
                    # It returns nothing that it was given; a copy of that may be gone already.
                    results = range(len(outputs_of(branch.graph)))
                    branch.graph.output_node().meta[_META] = {i: f"result {i}" for i in results}


def hand_fresh_outputs_on(joint: fx.Graph, forward: fx.Graph) -> None:
    """What was noted on a joint graph holds for the forward graph: its first outputs are the same."""
    forward.output_node().meta[_META] = joint.output_node().meta[_META]


def keep_outputs_fresh(graph: fx.Graph) -> None:
    """Copy outputs that were noted as fresh and have come to lie in the memory of an input, or of an output that they shared none with."""
    output = graph.output_node()
    bases, outputs = _bases(graph), outputs_of(graph)
    taken = _in_memory_of_inputs(graph)
    together: dict[tuple[str, fx.Node], list[int]] = {}
    for i, name in output.meta.get(_META, {}).items():
        if (base := bases[i]) is not None:
            together.setdefault((name, base), []).append(i)
    for (_, base), indices in together.items():
        if base.op == "call_function" and base not in taken:
            taken.add(base)
            continue
        root = base if len(indices) > 1 else outputs[indices[0]]
        moved = {root: _call_behind(root, aten.clone.default, (root,))}
        for i in indices:
            outputs[i] = _moved(outputs[i], moved)
    output.args = (tuple(outputs),) if isinstance(output.args[0], (list, tuple)) else (outputs[0],)


def _in_memory_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """What a graph copies into an input at its end, and what that was made of: Inductor makes these writes in the memory of the input, one after
    the other, and does not see that the graph returns a value in between."""
    found: set[fx.Node] = set()
    left: list[Any] = [n.args[1] for n in graph.find_nodes(op="call_function", target=aten.copy_.default)]
    while left:
        base = _base(left.pop())
        if base in found or base.op != "call_function":
            continue
        found.add(base)
        made = base.args[0] if base.target is operator.getitem else base
        name = made.target._schema.name if isinstance(made.target, OpOverload) else ""  # type: ignore[union-attr]
        if "scatter" in name or "index_put" in name:
            left.append(made.args[0])  # type: ignore[union-attr]
        elif not name.startswith("aten::"):
            left += made.all_input_nodes  # type: ignore[union-attr]
    return found


def _moved(node: fx.Node, moved: dict[fx.Node, fx.Node]) -> fx.Node:
    """A view like this one, of what was moved."""
    if node not in moved:
        _moved(aliased_arguments(node)[0], moved)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: moved.get(n, n))
        moved[node] = _call_behind(node, node.target, args, kwargs)
    return moved[node]


def _call_behind(node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """A call in the place of another node, directly behind it: later, somebody may have written to what it reads."""
    graph, before = node.graph, node.next
    while before.op == "placeholder":
        before = before.next
    with graph.inserting_before(before):
        call = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with detect_fake_mode(values) or contextlib.nullcontext():
        call.meta = {**node.meta, "val": target(*values[0], **values[1])}
    return call


def _bases(graph: fx.Graph) -> list[fx.Node | None]:
    """For each output whose memory it has; ``None`` for one that is no tensor."""
    return [
        _base(value)
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        else None
        for value in outputs_of(graph)
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
