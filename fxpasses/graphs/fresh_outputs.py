"""Keep outputs that own their memory fresh, whatever Inductor's passes do with the calls that computed them.

``x * 1`` is new memory, and the graph's caller may write to it. Within the graph it equals ``x``: Inductor
drops the multiplication, and a write to the output then changes the input. The same holds for two copies of
one value. (A pass of ours or of a user that does this is an error: see ``pass_manager.structure``.)
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
"""Key of the output node's metadata that lists its fresh outputs."""


def mark_fresh_outputs(graph: fx.Graph, count: int | None = None) -> None:
    """Record which of the first ``count`` outputs (all by default) are fresh, and which share memory.

    An output is fresh if it shares no input's memory.
    """
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
                    # A branch returns none of its inputs. A copy of an input may be gone already.
                    results = range(len(outputs_of(branch.graph)))
                    branch.graph.output_node().meta[_META] = {i: f"result {i}" for i in results}


def copy_fresh_outputs(joint: fx.Graph, forward: fx.Graph) -> None:
    """Copy a joint graph's record to the forward graph, whose first outputs are the same."""
    forward.output_node().meta[_META] = joint.output_node().meta[_META]


def keep_outputs_fresh(graph: fx.Graph) -> None:
    """Copy fresh outputs that now share memory with an input, or newly share it with another output."""
    output = graph.output_node()
    bases, outputs = _bases(graph), outputs_of(graph)
    taken = _written_to_inputs(graph)
    together: dict[tuple[str, fx.Node], list[int]] = {}
    for i, name in output.meta.get(_META, {}).items():
        if (base := bases[i]) is not None:
            together.setdefault((name, base), []).append(i)
    for (_, base), indices in together.items():
        if base.op == "call_function" and base not in taken:
            taken.add(base)
            continue
        root = base if len(indices) > 1 else outputs[indices[0]]
        moved = {root: _insert_call_after(root, aten.clone.default, (root,))}
        for i in indices:
            outputs[i] = _rebuild_view(outputs[i], moved)
    output.args = (tuple(outputs),) if isinstance(output.args[0], (list, tuple)) else (outputs[0],)


def _written_to_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The values that a graph finally copies into an input, and the values these are built from.

    Inductor performs these writes in the input's memory, one after the other, and does not see that the graph
    returns a value in between."""
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


def _rebuild_view(node: fx.Node, moved: dict[fx.Node, fx.Node]) -> fx.Node:
    """Recreate a view on top of the moved value."""
    if node not in moved:
        _rebuild_view(aliased_arguments(node)[0], moved)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: moved.get(n, n))
        moved[node] = _insert_call_after(node, node.target, args, kwargs)
    return moved[node]


def _insert_call_after(node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """Insert a call directly after another node. Later, someone may have written to what it reads."""
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
    """For each output, the value whose memory it has, or ``None`` if it is not a tensor."""
    return [
        _base(value)
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        else None
        for value in outputs_of(graph)
    ]


def _base(node: fx.Node) -> fx.Node:
    """The value that a chain of views starts from. Results of operators without a schema count as fresh."""
    while True:
        source = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(source, fx.Node) and isinstance(source.target, OpOverload)):
            return node
        aliased = aliased_arguments(node)
        if not aliased:
            return node
        node = aliased[0]
