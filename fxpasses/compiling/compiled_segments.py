"""Compile a graph around calls that are already compiled, and run all of it with one function.

Inductor spends tens of milliseconds on each call of an operator that it does not know, and on each of its
results. In a deep model with regions, nearly the whole graph consists of such calls. So these calls are taken
out. The rest is cut into *segments*, as few as ordering allows (before a stack of layers, and after it).
Inductor compiles each segment like a graph of its own. A generated function calls segments and regions in
turn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxpasses import _torch
from fxpasses.compiling.ordered import communication_calls, depths_in_order, overlaps
from fxpasses.graphs.aliasing import is_random
from fxpasses.graphs.rewriting import value_of

MOST_SEGMENTS = 4
"""Maximum number of segments that pay off: each is compiled on its own, and nothing is fused across them."""
MOST_BETWEEN_MESSAGES = 16
"""Maximum number of segments if messages travel while they run."""

COPY = torch.ops.aten.copy_.default
"""The operator with which a functional graph writes to its inputs, at its end."""

FindCallable = Callable[[fx.Node], Callable[..., Any] | None]
"""Returns the callable of an already compiled call, and ``None`` for other calls. It takes the call's argument
lists, and may empty them."""


@dataclass
class Segment:
    """Calls that are compiled together.

    Attributes:
        nodes: the calls, in order.
        inputs: the values that they read from elsewhere, in the order of the compiled segment's inputs.
        outputs: the values that others read from them.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass
class Cut:
    """A graph as segments and direct calls.

    Attributes:
        gm: the graph.
        steps: segments and nodes of direct calls, in a valid order of execution.
        direct: the callable that runs each of those nodes.
        communication: the nodes among them that are collectives or pack their messages. Their callables take the
            values that the node needs, in order.
    """

    gm: fx.GraphModule
    steps: list[Segment | fx.Node]
    direct: dict[fx.Node, Callable[..., Any]]
    communication: set[fx.Node] = field(default_factory=set)

    @property
    def segments(self) -> list[Segment]:
        """The segments, in order."""
        return [step for step in self.steps if isinstance(step, Segment)]


def cut_into_segments(gm: fx.GraphModule, compiled_callable: FindCallable) -> Cut | None:
    """Take the calls that are already compiled, the *direct calls*, out of a functional graph.

    A segment runs as soon as the direct calls that it needs have run. The final updates of inputs (``copy_``)
    run last, when no one reads the old values anymore. Where messages travel while something is computed,
    collectives are taken out as well, and keep their places (:mod:`.ordered`).

    Returns:
        ``None`` if there is no such call, or if the graph is better left alone: it would need too many
        segments, writes to memory in other ways, or must call the RNG in eager's order.
    """
    running = {node: run for node in gm.graph.nodes if (run := compiled_callable(node)) is not None}
    communication = communication_calls(gm.graph) if overlaps(gm.graph, running) else set()
    if not (running or communication) or not all(
        _may_move(node) for node in gm.graph.nodes if node not in running
    ):
        return None
    running |= {node: _function_of(node) for node in communication}
    if any(n.op == "get_attr" for node in running for n in node.all_input_nodes):
        return None
    depth = depths_in_order(gm.graph, running) if communication else _depths(gm.graph, running)
    segments = [Segment() for _ in range(1 + max(depth.values(), default=0))]
    calls: list[list[fx.Node]] = [[] for _ in segments]
    segment_of: dict[fx.Node, Segment] = {}
    for node, index in depth.items():
        if node in running:
            calls[index].append(node)
        elif not _is_result(node, running):
            segments[index].nodes.append(node)
            segment_of[node] = segments[index]
    symbols = [n for n in gm.graph.find_nodes(op="placeholder") if isinstance(value_of(n), torch.SymInt)]
    for segment in segments:
        connect_segment(segment, segment_of, symbols)
    most = MOST_BETWEEN_MESSAGES if communication else MOST_SEGMENTS
    if sum(bool(segment.outputs) for segment in segments) > most:
        return None
    if not all(_knows_symbols(segment, symbols) for segment in segments):
        return None
    steps: list[Segment | fx.Node] = []
    for segment, ready in zip(segments, calls, strict=True):
        # One without outputs only updates inputs, or computes nothing that is used.
        steps += [segment] if segment.outputs or any(n.target is COPY for n in segment.nodes) else []
        steps += ready
    return Cut(gm, steps, running, communication)


def _function_of(node: fx.Node) -> Callable[..., Any]:
    """Turn a call into a function of the values that it needs."""
    needed = node.all_input_nodes

    def run(*values: Any) -> Any:
        known = dict(zip(needed, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[misc]
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return run


def _may_move(node: fx.Node) -> bool:
    """Whether a call may run earlier or later than its position, as far as its arguments allow."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return all(user.op == "call_function" for user in node.users)
    target = node.target
    if target is COPY:
        kept = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        return kept and not node.users
    if isinstance(target, _torch.OpOverload):
        if _torch.inductor_config.fallback_random and is_random(node):
            return False
        return not target._schema.is_mutable
    return node.op == "call_function" and not isinstance(target, _torch.HigherOrderOperator)


def _depths(graph: fx.Graph, running: Mapping[fx.Node, Callable[..., Any]]) -> dict[fx.Node, int]:
    """For each call, how many segments must run before its own."""
    depth: dict[fx.Node, int] = {}
    last: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is COPY:
            last.append(node)
            continue
        waits = node not in running and not _is_result(node, running)
        depth[node] = max(
            (
                depth[n] + (waits and (n in running or _is_result(n, running)))
                for n in node.all_input_nodes
                if n in depth
            ),
            default=0,
        )
    deepest = max((d + (n in running) for n, d in depth.items()), default=0)
    depth.update(dict.fromkeys(last, deepest))
    return depth


def _is_result(node: fx.Node, running: Mapping[fx.Node, Callable[..., Any]]) -> bool:
    """Whether the node extracts one result of a direct call."""
    return node.target is operator.getitem and node.args[0] in running


def connect_segment(segment: Segment, segment_of: dict[fx.Node, Segment], symbols: Sequence[fx.Node]) -> None:
    """Fill in the inputs and outputs of a segment.

    Args:
        segment: its ``inputs`` are set, and its ``outputs`` are appended to.
        segment_of: maps each call to the segment that runs it.
        symbols: the graph's symbolic sizes. They come first in every segment's inputs.
    """
    inputs: dict[fx.Node, None] = dict.fromkeys(symbols)
    for node in segment.nodes:
        for read in node.all_input_nodes:
            if segment_of.get(read) is not segment and read.op != "get_attr":
                inputs[read] = None
        if any(segment_of.get(user) is not segment for user in node.users):
            segment.outputs.append(node)
    segment.inputs = list(inputs)


def _knows_symbols(segment: Segment, symbols: Sequence[fx.Node]) -> bool:
    """Whether every symbol in a segment's sizes is passed to it as an integer."""
    known = set().union(*(_torch.free_symbols(value_of(n)) for n in symbols)) if symbols else set()
    return all(_torch.free_symbols(value_of(n)) <= known for n in [*segment.nodes, *segment.inputs])


def segment_module(gm: fx.GraphModule, segment: Segment) -> fx.GraphModule:
    """Build a segment's own graph, with names of its own, so that its text is the same in a deeper model."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(segment.inputs):
        values[node] = graph.placeholder(f"input_{number}")

    def argument(node: fx.Node) -> fx.Node:
        if node not in values:  # a constant
            values[node] = graph.get_attr(str(node.target))
        return values[node]

    for node in segment.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), argument)
        values[node] = graph.call_function(node.target, *arguments)  # type: ignore[arg-type]
    for node, copied in values.items():
        copied.meta = {**node.meta, "name_in_whole": name_in_whole(node)}
    output = graph.output(tuple(values[node] for node in segment.outputs))
    output.meta["user_visible_output_idxs"] = list(range(len(segment.outputs)))
    module = fx.GraphModule(gm, graph)
    module.meta.update(gm.meta)
    return module


def name_in_whole(node: fx.Node) -> str:
    """The name that a segment's node has in the graph it was cut from; for any other node, its own name."""
    return str(node.meta.get("name_in_whole", node.name))


def with_strides(value: Any, strides: Sequence[int] | None) -> Any:
    """Give a fake value the strides that the compiled segment returns, if they are known and differ."""
    if strides is None or not isinstance(value, torch.Tensor):
        return value
    traced = value.stride()
    if any(type(s) is not int for s in (*traced, *strides, *value.shape)) or tuple(strides) == traced:
        return value
    return value.as_strided(value.shape, tuple(strides))


def changed_strides(found: Cut, values: Mapping[fx.Node, Any]) -> dict[fx.Node, tuple[int, ...]]:
    """Find the values that direct calls would read with strides other than those traced and compiled.

    A segment whose inputs have another layout (Inductor chose it for what the forward graph saves) returns
    results in that layout, too.

    Args:
        found: the graph, cut.
        values: fake values with their actual strides, where these are known.

    Returns:
        The traced strides of these values.
    """
    read = {node for step in found.steps if isinstance(step, fx.Node) for node in step.all_input_nodes}
    changed = {}
    for node in read & values.keys():
        traced = value_of(node)
        if not isinstance(traced, torch.Tensor):
            continue
        known = all(type(s) is int for s in (*traced.shape, *traced.stride()))
        if known and traced.numel() and tuple(values[node].stride()) != traced.stride():
            changed[node] = tuple(traced.stride())
    return changed


def fitted(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these strides: the same tensor, or a copy."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def stitch_segments(
    found: Cut,
    compiled: Sequence[Callable[..., Any]],
    changed: Mapping[fx.Node, tuple[int, ...]] = MappingProxyType({}),
) -> Callable[[list[Any]], Any]:
    """Build one function with the graph's calling convention: a list of inputs, which it empties, to a tuple.

    Args:
        found: the graph, cut.
        compiled: its segments, each with the same convention.
        changed: values that direct calls receive as copies with these strides.
    """
    graph = found.gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    left = _count_uses(found, output)
    known: dict[str, Any] = {}
    lines = [f"{_names(placeholders)} = inputs", "inputs.clear()"]
    lines += _del_statements([n for n in placeholders if not left.get(n)])
    segments = iter(compiled)
    for number, step in enumerate(found.steps):
        read = step.inputs if isinstance(step, Segment) else step.all_input_nodes
        for node in read:
            left[node] -= 1
        # The callee holds the only reference to what no one else needs, and can free it early.
        done = _del_statements([node for node in dict.fromkeys(read) if not left[node]])
        run = f"run_{number}"
        if isinstance(step, Segment):
            known[run] = next(segments)
            lines += [f"given = [{_text(list(read))}]", *done]
            lines += [f"{_names(step.outputs)} = {run}(given)" if step.outputs else f"{run}(given)"]
        elif step in found.communication:
            known[run] = found.direct[step]
            lines += [f"{_name(step)} = {run}({_text(read)})", *done]
        else:
            known[run] = found.direct[step]
            lists = [argument for argument in step.args if isinstance(argument, (list, tuple))]
            lines += [f"given_{i} = [{_text(argument, changed)}]" for i, argument in enumerate(lists)]
            lines += [*done, f"results = {run}({', '.join(f'given_{i}' for i in range(len(lists)))})"]
            lines += [f"{_name(user)} = results[{user.args[1]}]" for user in step.users if left.get(user)]
            lines += ["del results"]
    values: Any = output.args[0]  # empty in a graph that only updates its inputs
    lines += [f"return ({_text(values)}{',' if values else ''})"]
    return load_stitched("def call(inputs):\n" + "".join(f"    {line}\n" for line in lines), known)


def load_stitched(source: str, parts: Mapping[str, Callable[..., Any]]) -> Callable[[list[Any]], Any]:
    """Load the function from its source, with ``parts`` as globals. The function keeps both as attributes."""
    known: dict[str, Any] = {"fitted": fitted, **parts}
    exec(compile(source, "<stitched graph>", "exec"), known)
    call = known["call"]
    call.source, call.parts = source, parts
    call._boxed_call = True
    return call


def _count_uses(found: Cut, output: fx.Node) -> dict[fx.Node, int]:
    """The number of steps that read each value. The output counts as a step that never runs."""
    left: dict[fx.Node, int] = {}
    for step in found.steps:
        for node in step.inputs if isinstance(step, Segment) else step.all_input_nodes:
            left[node] = left.get(node, 0) + 1
    for node in output.all_input_nodes:
        left[node] = left.get(node, 0) + 1
    return left


def _del_statements(nodes: Sequence[fx.Node]) -> list[str]:
    return ["del " + ", ".join(map(_name, nodes))] if nodes else []


def _name(node: fx.Node) -> str:
    return f"v_{node.name}"


def _names(nodes: Sequence[fx.Node]) -> str:
    return f"({''.join(_name(node) + ', ' for node in nodes)})"


def _text(values: Sequence[Any], changed: Mapping[fx.Node, tuple[int, ...]] = MappingProxyType({})) -> str:
    def text(value: Any) -> str:
        if not isinstance(value, fx.Node):
            return repr(value)
        return f"fitted({_name(value)}, {changed[value]})" if value in changed else _name(value)

    return ", ".join(map(text, values))
