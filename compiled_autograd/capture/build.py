"""Turn the steps of a capture into a readable FX graph, in the order in which eager runs the nodes.

The graph takes five arguments, as the engine passes them: ``inputs`` (saved tensors, parameters and incoming
gradients), ``sizes``, ``scalars``, ``hooks`` (hook functions and contexts of custom Functions) and ``packed``
(saved tensors as packed by saved-tensor hooks). ``inputs``, ``hooks`` and ``packed`` are lists that the graph
clears at its start, so that each element is freed after its last use. It returns one gradient per requested
input.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd.capture.captured_steps import (
    CapturedNode,
    Constant,
    InputValue,
    Step,
    SumValue,
    Value,
    leaves,
)
from compiled_autograd.capture.recorder import Capture
from compiled_autograd.runtime import functional
from compiled_autograd.runtime._torch_nodes import NodeWriter
from compiled_autograd.runtime.executing import graph_module
from compiled_autograd.runtime.node_order import eager_order

PLACEHOLDERS = ("inputs", "sizes", "scalars", "hooks", "packed")
FREED = ("inputs", "hooks", "packed")
"""Arguments that the graph clears at its start, so that their elements are freed after their last use."""


@functools.lru_cache(1024)
def node_label(name: str) -> str:
    """Make a name for graph nodes from the name of an autograd node.

    >>> node_label("MulBackward0"), node_label("torch::autograd::AccumulateGrad")
    ('mul_backward0', 'accumulate_grad')
    """
    last = re.sub(r"\W+", "_", name.split("::")[-1].split(" ")[0])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()


def ordered_nodes(capture: Capture) -> list[CapturedNode]:
    """Return the captured nodes in eager's order, or in C++'s order if eager's is unknown."""
    if capture.walked is None or len(capture.walked) != len(capture.nodes):
        return capture.nodes
    nodes = [capture.nodes[index] for index in eager_order(capture.walked)]
    return _order_leaves_by_production(nodes) if capture.inlined else nodes


def _order_leaves_by_production(nodes: Sequence[CapturedNode]) -> list[CapturedNode]:
    """Reorder leaves that follow an inlined function by when its body produces their gradients.

    Eager does the same without compilation. For the engine, a compiled function is one node, so it orders the
    leaves as its inputs.
    """
    turns: dict[tuple[int, int], int] = {}
    run = 0
    for step in (step for node in nodes for step in node.steps if step.inlined is not None):
        made = {id(part): run + turn for turn, part in enumerate(step.inlined.steps)}  # type: ignore[union-attr]
        run += len(made)
        for index, output in enumerate(step.inlined.outputs):  # type: ignore[union-attr]
            if type(output) is Value:
                turns[id(step), index] = made[id(output.step)]

    def turn(leaf: CapturedNode) -> int:
        values = [value for step in leaf.steps for value in leaves(step.args)]
        values += [part for value in values if type(value) is SumValue for part in value.parts]
        return max(
            (
                turns.get((id(v.step), v.index), -1)
                for v in values
                if type(v) is Value and v.index is not None
            ),
            default=-1,
        )

    ordered: list[CapturedNode] = []
    for are_leaves, group in itertools.groupby(nodes, lambda node: node.name.endswith("AccumulateGrad")):
        together = list(group)
        ordered += sorted(together, key=turn) if are_leaves else together
    return ordered


_NO_KEYWORDS: dict[str, Any] = {}
_PLAIN = {type(None), bool, int, float, str, torch.dtype}


class _Emitter:
    """Writes steps into an FX graph."""

    def __init__(self, capture: Capture, nodes: Sequence[CapturedNode], inline: bool) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.capture = capture
        self.inline = inline and bool(capture.inlined)
        self.constants: dict[int, fx.Node] = {}
        self.writer = NodeWriter(self.graph)
        self.sources = {name: self.graph.placeholder(name) for name in PLACEHOLDERS}
        self.results: dict[int, fx.Node] = {}
        self.elements: dict[tuple[int, int], fx.Node] = {}
        self.input_elements: dict[str, dict[int, fx.Node]] = {source: {} for source in PLACEHOLDERS}
        self.sums: dict[int, Any] = {}
        self.sums_by_producer: dict[int, dict[int, tuple[SumValue, list[Any]]]] = {}
        """Per autograd node, the sums that its values contribute to, keyed by identity, with those values."""
        self.meta: dict[str, Any] = {}
        self.used: dict[int, set[int]] = {}
        """Per step, keyed by identity, the elements of its result that are used."""
        self.used_inputs: dict[str, set[int]] = {source: set() for source in PLACEHOLDERS}
        for node in nodes:
            for step in self._steps(node):
                self._record_uses(step.args)
                if step.kwargs:
                    self._record_uses(step.kwargs)
        self._record_uses(self.capture.outputs)
        self._unpack_arguments()

    def _steps(self, node: CapturedNode) -> Iterable[Step]:
        """Return the steps that the graph runs for ``node``."""
        if not self.inline:
            return node.steps
        return [part for step in node.steps for part in (step.inlined.steps if step.inlined else (step,))]

    def _resolved(self, value: Any) -> Any:
        """Replace an output of an inlined call by the value in its body."""
        if self.inline and type(value) is Value and value.step.inlined is not None:
            assert value.index is not None  # an inlined call has several results
            return value.step.inlined.outputs[value.index]
        return value

    def _record_uses(self, argument: Any) -> None:
        """Record which results and graph arguments are used, and which sums a node's values contribute to."""
        for value in map(self._resolved, leaves(argument)) if self.inline else leaves(argument):
            kind = type(value)
            if kind is Value:
                if value.index is not None:
                    self.used.setdefault(id(value.step), set()).add(value.index)
            elif kind is InputValue:
                self.used_inputs[value.source].add(value.index)
            elif kind is SumValue and id(value) not in self.sums:
                self.sums[id(value)] = None
                for part in value.parts:
                    self._record_uses(part)
                    producer = part.step.node if isinstance(part, Value) else 0
                    sums = self.sums_by_producer.setdefault(producer, {})
                    sums.setdefault(id(value), (value, []))[1].append(part)

    def _unpack_arguments(self) -> None:
        for source, wanted in self.used_inputs.items():
            name, whole, elements = source.rstrip("s"), self.sources[source], self.input_elements[source]
            for index in sorted(wanted):
                element = self.writer.call(operator.getitem, (whole, index), f"{name}_{index}")
                if source == "inputs":
                    dtype, device, requires_grad = self.capture.input_metadata[index]
                    element.meta.update(dtype=dtype, device=device, requires_grad=requires_grad)
                elements[index] = element
        for source in FREED:
            if source == "inputs" or self.used_inputs[source]:
                self.graph.create_node("call_method", "clear", (self.sources[source],), name=f"free_{source}")

    def argument(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is Value:
            if self.inline and argument.step.inlined is not None:
                return self.argument(self._resolved(argument))
            if argument.index is None:
                return self.results[id(argument.step)]
            return self.elements[id(argument.step), argument.index]
        if kind is InputValue:
            return self.input_elements[argument.source][argument.index]
        if kind in _PLAIN:
            return argument
        if kind is list or kind is tuple:
            values = [part if type(part) in _PLAIN else self.argument(part) for part in argument]
            return values if kind is list else tuple(values)
        if kind is SumValue:
            return self.sums[id(argument)]
        if kind is dict:
            return {key: self.argument(element) for key, element in argument.items()}
        if kind is slice:
            return slice(*map(self.argument, (argument.start, argument.stop, argument.step)))
        if kind is Constant:
            return self._constant(argument)
        return argument

    def _constant(self, constant: Constant) -> fx.Node:
        node = self.constants.get(id(constant.value))
        if node is None:
            name = f"{constant.name}_{len(self.constants)}"
            setattr(self.root, name, constant.value)
            node = self.constants[id(constant.value)] = self.graph.get_attr(name)
        return node

    def _create(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> fx.Node:
        node = self.writer.call(target, args, name, kwargs)
        node.meta.update(self.meta)
        return node

    def step(self, step: Step) -> None:
        label = node_label(step.label)
        kwargs = _NO_KEYWORDS
        if step.takes_node:
            kwargs = {"node": step.node}
        elif step.kwargs:
            kwargs = self.argument(step.kwargs)
        result = self._create(step.target, self.argument(step.args), kwargs, label)
        result.meta["kind"] = step.kind
        if step.meta:
            result.meta.update(step.meta)
        self.results[id(step)] = result
        for index in sorted(self.used.get(id(step), ())):
            self.elements[id(step), index] = self._create(
                operator.getitem, (result, index), _NO_KEYWORDS, f"{label}_grad{index}"
            )

    def node(self, node: CapturedNode) -> None:
        self.meta = {"autograd_node": node.name, "node_index": node.index, "seq_nr": node.sequence_nr}
        if node.stack_trace is not None:
            self.meta["stack_trace"] = node.stack_trace
        for step in self._steps(node):
            self.step(step)
        # Like the engine's input buffers: add each gradient when the node that produced it has run.
        for total, parts in self.sums_by_producer.get(node.index, {}).values():
            for part in parts:
                self._add(total, part)

    def _add(self, total: SumValue, part: Any) -> None:
        value = self.argument(part)
        before = self.sums[id(total)]
        if before is not None:
            value = self._create(functional.accumulate, (before, value), {}, "accumulate")
        self.sums[id(total)] = value


def build_graph(capture: Capture, nodes: Sequence[CapturedNode], inline: bool = True) -> fx.GraphModule:
    """Build the whole pass as one `torch.fx.GraphModule`.

    ``meta`` of each node names its autograd node (``autograd_node``, ``node_index``), that node's sequence
    number (``seq_nr``, a counter of the forward), and the forward's stack trace if anomaly mode recorded one
    (``stack_trace``).

    Args:
        capture: the recording of the pass.
        nodes: its autograd nodes, in execution order.
        inline: inline the backward graphs of compiled functions, instead of calling them.
    """
    emitter = _Emitter(capture, nodes, inline)
    for node in nodes:
        emitter.node(node)
    emitter.graph.output(emitter.argument(capture.outputs))
    return graph_module(emitter.root, emitter.graph, "BackwardGraph")
