"""Cut a repeated subgraph out as its own graph, and find the calls that stay outside.

The region's graph takes symbols, then tensors, and returns tensors that share no memory with each other or an
input. Calls outside may also need a view or a size: the calls that compute it are copied outside, where they
cost nothing. An input that the subgraph writes to (a running mean, for example) is copied first; its new
value is an extra output, which the outer graph copies back.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fake.error_text import describe_error
from fxpasses.graphs.rewriting import attribute_of
from fxpasses.regional import _torch, _torch_dtensor
from fxpasses.regional.errors import RegionRefused
from fxpasses.regional.facts import GraphFacts, is_literal, literal, uses_storage_offset, value_of, wiring
from fxpasses.regional.parameters import is_static
from fxpasses.regional.region_search import Subgraph
from fxpasses.regional.writes import target_name, updated_statistics

_VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "t", "chunk", "split", "unbind", "getitem", "select",
        "narrow", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "to", "detach",
        "movedim", "dropout", "swapaxes", "diagonal", "view_as", "expand_as", "real", "imag", "size", "getattr",
        "float", "type_as", "slice", "tensor_split", "hsplit", "vsplit", "mul", "add", "sub", "floordiv", "neg",
        "numel", "sym_size", "double", "to_local", "from_local",
    }
)  # fmt: skip
"""Calls that may be repeated outside: they return a view or a number, and write nothing."""


@dataclass
class RegionGraph:
    """The graph of a region, cut out of its surrounding graph.

    Attributes:
        gm: maps symbols and tensors to the outputs, followed by the new values of the inputs in ``written``.
        symbols: the symbols in its sizes, in the order of its arguments.
        inputs: a fake tensor for each tensor input.
        wraps: for each tensor input, the function that makes a DTensor of it if it is one outside; else
            ``None``.
        static: for each tensor input, whether it lives as long as the model.
        written: which tensor inputs the subgraph writes to.
        outputs: indices in the subgraph of the values that it returns.
        copied: indices in the subgraph of the calls that are repeated outside.
        same: for each call whose value is the same tensor as another node's, that node's index, or a negative
            number for a tensor input (-1 for the first).
        shared: for each tensor input, whether it is the same tensor in all copies and needs no gradient.
        text: its calls, as text that is equal in every process.
    """

    gm: fx.GraphModule
    symbols: list[sympy.Symbol]
    inputs: list[torch.Tensor]
    wraps: list[_torch_dtensor.WrapLocal | None]
    static: list[bool]
    written: list[int]
    outputs: list[int]
    copied: list[int]
    same: dict[int, int]
    shared: list[bool]
    text: str

    @property
    def example_inputs(self) -> list[Any]:
        """Return symbolic sizes and fake tensors, in the order of ``gm``'s placeholders."""
        return [node.meta["example_value"] for node in self.gm.graph.find_nodes(op="placeholder")]

    @property
    def meshes(self) -> tuple[int, ...]:
        """Return the ids of its device meshes, which their repr does not include."""
        held = [value_of(node) for node in self.gm.graph.find_nodes(op="get_attr")]
        found = [wrap.spec.mesh for wrap in self.wraps if wrap] + [_torch_dtensor.mesh_of(v) for v in held]
        return tuple(id(mesh) for mesh in found if mesh is not None)

    @property
    def digest(self) -> str:
        """Return a hash of the graph's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def input_tensors(facts: GraphFacts, subgraph: Subgraph) -> list[fx.Node]:
    """Return the tensors that a subgraph reads from outside, in order of first use."""
    return [
        n
        for n in wiring(facts, subgraph.start, subgraph.stop)[1]
        if isinstance(_node_value(n, facts), torch.Tensor)
    ]


def extract_region(
    gm: fx.GraphModule, facts: GraphFacts, subgraphs: Sequence[Subgraph], symbols: dict[Any, fx.Node]
) -> RegionGraph:
    """Cut out the first of several isomorphic subgraphs as a graph that serves them all.

    Args:
        gm: the surrounding graph.
        facts: the facts about that graph.
        subgraphs: the subgraphs. A value that is used after any of them is an output.
        symbols: the placeholder of each symbol in ``gm``.

    Raises:
        RegionRefused: if it cannot be a function from tensors to fresh tensors.
    """
    return _RegionExtractor(gm, facts, subgraphs, symbols).extract()


class _RegionExtractor:
    def __init__(
        self,
        gm: fx.GraphModule,
        facts: GraphFacts,
        subgraphs: Sequence[Subgraph],
        symbols: dict[Any, fx.Node],
    ) -> None:
        self.gm, self.facts, self.subgraphs, self.known_symbols = gm, facts, subgraphs, symbols
        self.subgraph = subgraphs[0]
        self.calls = facts.calls[self.subgraph.start : self.subgraph.stop]
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.wires, outside = wiring(facts, self.subgraph.start, self.subgraph.stop)
        self.tensors = input_tensors(facts, self.subgraph)
        for node in outside:
            value = _node_value(node, facts)
            if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int)):
                raise RegionRefused(f"it takes {node.name}, which is a {type(value).__name__}")
        self._refuse_storage_offsets()
        locals_ = [_torch_dtensor.local_of(_node_value(n, facts)) for n in self.tensors]
        self.fake_mode: Any = _torch.detect_fake_mode(locals_)
        if self.fake_mode is None:
            raise RegionRefused("the graph has no fake values")
        self.wraps = [self._wrap(node) for node in self.tensors]

    def _wrap(self, node: fx.Node) -> _torch_dtensor.WrapLocal | None:
        """Return the function that wraps the local tensor inside, if the value is a DTensor."""
        value = _node_value(node, self.facts)
        if not _torch_dtensor.is_dtensor(value):
            return None
        self._refuse_dtensor(node)
        return _torch_dtensor.WrapLocal(value)

    def _refuse_dtensor(self, node: fx.Node) -> None:
        """Refuse a DTensor that its local tensor and a placement known to both sides do not describe."""
        value = _node_value(node, self.facts)
        if _torch_dtensor.mesh_and_placements(value) is None:
            raise RegionRefused(f"{node.name} is a DTensor with the placements {value.placements}")
        if any(_torch.free_symbols(size) for size in value.shape):
            raise RegionRefused(f"{node.name} is a DTensor of symbolic size")

    def _refuse_storage_offsets(self) -> None:
        """Refuse calls that depend on an input's storage offset, which is 0 inside a region."""
        for number, call in enumerate(self.calls):
            if not uses_storage_offset(call):
                continue
            for subgraph in self.subgraphs:
                reads = self.facts.reads[subgraph.start + number]
                storages = {_torch.storage_of(_node_value(n, self.facts)) for n in reads}
                for node in input_tensors(self.facts, subgraph):
                    value = _node_value(node, self.facts)
                    if (
                        _torch.storage_of(value) in storages
                        and _torch.expression(value.storage_offset()) != 0
                    ):
                        raise RegionRefused(f"{call.name} depends on where in its memory {node.name} begins")

    def extract(self) -> RegionGraph:
        needed = sorted(
            {
                position - subgraph.start
                for subgraph in self.subgraphs
                for position in range(subgraph.start, subgraph.stop)
                if self.facts.last_use[position] >= subgraph.stop
            }
        )
        inputs = [self._fresh(_node_value(node, self.facts)) for node in self.tensors]
        symbols = self._symbols()
        written = self._written(symbols, inputs)
        outputs, copied, same = self._classify_values(needed, written)
        for position in outputs:
            if _torch_dtensor.is_dtensor(value_of(self.calls[position])):
                self._refuse_dtensor(self.calls[position])
        if not outputs and not written:
            raise RegionRefused("nothing that it computes is used")
        gm = self._graph(symbols, inputs, written, outputs)
        descriptions = [self.facts.descriptions[i] for i in range(self.subgraph.start, self.subgraph.stop)]
        shape_env = self.fake_mode.shape_env
        facts = [(str(s), _torch.hint_and_range(shape_env, s)) for s in symbols]
        text = repr(
            (descriptions, self.wires, outputs, written, facts, self._ambient(), _torch.ambient_state())
        )
        static = [is_static(node) for node in self.tensors]
        return RegionGraph(
            gm,
            symbols,
            inputs,
            self.wraps,
            static,
            written,
            outputs,
            copied,
            same,
            self._shared(written),
            text,
        )

    def _shared(self, written: list[int]) -> list[bool]:
        given = [input_tensors(self.facts, subgraph) for subgraph in self.subgraphs]
        return [
            len(self.subgraphs) > 1
            and i not in written
            and not _node_value(node, self.facts).requires_grad
            and all(nodes[i] is node for nodes in given)
            for i, node in enumerate(self.tensors)
        ]

    def _ambient(self) -> Any:
        start = self.subgraph.start
        return [node.args for node in self.facts.autocast[start]], self.facts.grad_mode[start]

    def _symbols(self) -> list[sympy.Symbol]:
        if not self.facts.dynamic:
            return []
        found: dict[sympy.Symbol, None] = {}
        for node in [
            *self.tensors,
            *self.calls,
            *(n for i in range(self.subgraph.start, self.subgraph.stop) for n in self.facts.reads[i]),
        ]:
            for value in _leaves(_node_value(node, self.facts)):
                found.update(dict.fromkeys(sorted(_torch.free_symbols(value), key=str)))
        for symbol in found:
            if symbol not in self.known_symbols:
                raise RegionRefused(f"the size {symbol} is not an input of the graph")
        return list(found)

    def _fresh(self, value: torch.Tensor) -> torch.Tensor:
        """Create a fake tensor with the same (local) metadata: a leaf with its own memory."""
        local = _torch_dtensor.local_of(value)
        with self.fake_mode, torch.no_grad():
            fresh = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
        return fresh.requires_grad_(value.requires_grad)

    def _written(self, symbols: list[sympy.Symbol], inputs: list[torch.Tensor]) -> list[int]:
        """Return the inputs that the subgraph writes to, by version counters in a run on fake tensors."""
        everything = self._graph(symbols, inputs, [], [])
        copies = [self._fresh(value).detach() for value in inputs]
        sizes = [self.known_symbols[s].meta["example_value"] for s in symbols]
        try:
            with _torch.fake_execution(self.fake_mode):
                everything(*sizes, *copies)
        except Exception as error:
            raise RegionRefused(f"it cannot run on its own: {describe_error(error)}") from error
        written = {i for i, value in enumerate(copies) if value._version > 0}
        slot = {node: i for i, node in enumerate(self.tensors)}
        written |= {slot[n] for call in self.calls for n in updated_statistics(call) if n in slot}
        for index in sorted(written):
            if self.wraps[index] is not None:
                raise RegionRefused(f"it writes to {self.tensors[index].name}, a DTensor")
            if inputs[index].requires_grad and self.tensors[index].op == "placeholder":
                raise RegionRefused(f"it writes to {self.tensors[index].name}, which needs a gradient")
            for subgraph in self.subgraphs:
                nodes = input_tensors(self.facts, subgraph)
                storages = [_torch.storage_of(_node_value(n, self.facts)) for n in nodes]
                if storages.count(storages[index]) > 1:
                    raise RegionRefused(
                        f"it writes to {nodes[index].name}, which shares memory with another input"
                    )
        return sorted(written)

    def _classify_values(
        self, needed: list[int], written: list[int]
    ) -> tuple[list[int], list[int], dict[int, int]]:
        """Sort needed values into outputs, calls repeated outside, and aliases of other nodes."""
        outside = {_torch.storage_of(_node_value(node, self.facts)): i for i, node in enumerate(self.tensors)}
        outputs: list[int] = []
        copied: set[int] = set()
        same: dict[int, int] = {}
        base_of: dict[int, int] = {}
        first: dict[int, int] = {}
        for position, node in enumerate(self.calls):
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                first.setdefault(_torch.storage_of(value), position)
        wanted: dict[int, list[int]] = {}
        for position in needed:
            value = value_of(self.calls[position])
            if isinstance(value, torch.Tensor):
                wanted.setdefault(_torch.storage_of(value), []).append(position)
            elif isinstance(value, (torch.SymInt, int, torch.SymBool, torch.Size)):
                copied |= self._recomputed_calls(position, set(), set(written))
            elif value is not None:
                raise RegionRefused(f"its value {self.calls[position].name} is a {type(value).__name__}")
        for storage, indices in wanted.items():
            if storage in outside:
                index = outside[storage]
                for position in indices:
                    if value_of(self.calls[position]) is _node_value(self.tensors[index], self.facts):
                        same[position] = -1 - index
                    elif index in written:
                        raise RegionRefused(
                            f"{self.calls[position].name} is a view of an input that it writes to"
                        )
                    else:
                        copied |= self._recomputed_calls(position, set(), set(written))
                continue
            distinct = {id(value_of(self.calls[p])): p for p in reversed(indices)}
            base = indices[0] if len(distinct) == 1 else first[storage]
            outputs.append(base)
            base_of[storage] = base
            for position in indices:
                if position == base:
                    continue
                if value_of(self.calls[position]) is value_of(self.calls[base]):
                    same[position] = base
                else:
                    copied |= self._recomputed_calls(position, {base}, set(written))
        return sorted(outputs), sorted(copied), same

    def _recomputed_calls(self, position: int, available: set[int], written: set[int]) -> set[int]:
        """Return the calls that compute a view or a number from values known outside."""
        node = self.calls[position]
        if target_name(node) not in _VIEWS:
            raise RegionRefused(
                f"{node.name} shares memory with another value and {target_name(node)} cannot be repeated"
            )
        copies = {position}
        for read in self.facts.reads[self.subgraph.start + position]:
            inner = self.position.get(read)
            if inner is not None and inner not in available:
                copies |= self._recomputed_calls(inner, available, written)
            elif inner is None and read in self.tensors and self.tensors.index(read) in written:
                raise RegionRefused(f"{node.name} is a view of an input that it writes to")
        return copies

    def _graph(
        self, symbols: list[sympy.Symbol], inputs: list[torch.Tensor], written: list[int], outputs: list[int]
    ) -> fx.GraphModule:
        """Copy the calls into a graph of their own: sizes and tensors in, outputs and written tensors out."""
        graph = fx.Graph()
        attributes: dict[str, Any] = {}
        known: dict[Any, Any] = {}
        for i, symbol in enumerate(symbols):
            known[symbol] = graph.placeholder(f"size_{i}")
            known[symbol].meta["example_value"] = self.known_symbols[symbol].meta["example_value"]
        values: dict[fx.Node, Any] = {}
        for i, (node, value) in enumerate(zip(self.tensors, inputs, strict=True)):
            values[node] = graph.placeholder(f"input_{i}")
            values[node].meta["example_value"] = value
            if is_static(node):
                values[node].meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        for node, value, wrap in zip(self.tensors, inputs, self.wraps, strict=True):
            if wrap is not None:
                values[node] = graph.call_function(wrap, (values[node],))
                with self.fake_mode:
                    values[node].meta["example_value"] = wrap(value)
        opened = self._open_contexts(graph)
        for i in written:
            before = values[self.tensors[i]]
            values[self.tensors[i]] = graph.call_function(torch.clone, (before,))
            values[self.tensors[i]].meta["example_value"] = before.meta["example_value"]

        def argument(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            if is_literal(node):
                return literal(node)
            mesh = _torch_dtensor.mesh_of(value_of(node))
            if mesh is not None:
                attributes[f"mesh_{len(attributes)}"] = mesh
                values[node] = graph.get_attr(f"mesh_{len(attributes) - 1}")
                values[node].meta["example_value"] = mesh
                return values[node]
            if node.op == "get_attr":
                attributes[str(node.target)] = self.gm.get_submodule(str(node.target))
                values[node] = graph.get_attr(str(node.target))
                return values[node]
            if isinstance(value_of(node), torch.SymFloat):
                # A float of sizes: copied, not recomputed from the expression, so that the last bit agrees.
                values[node] = graph.node_copy(node, argument)
                return values[node]
            size = _torch.expression(value_of(node))
            if size not in known:
                known[size] = self._size(graph, size, {s: known[s] for s in symbols})
            return known[size]

        for node in self.calls:
            values[node] = graph.node_copy(node, argument)
        self._close_contexts(graph, opened)
        results = [values[self.calls[p]] for p in outputs]
        for number, node in enumerate(results):
            if _torch_dtensor.is_dtensor(value_of(node)):
                results[number] = graph.call_function(_torch_dtensor.unwrap, (node,))
                results[number].meta["example_value"] = _torch_dtensor.local_of(value_of(node))
        graph.output((*results, *(values[self.tensors[i]] for i in written)))
        region = fx.GraphModule(attributes, graph)
        _torch.mark_as_dynamo_graph(region)
        return region

    def _size(self, graph: fx.Graph, size: Any, symbols: dict[Any, fx.Node]) -> Any:
        """Compute a size from the graph's symbols."""
        last = next(iter(reversed(graph.nodes)), None)
        computed = _torch.evaluate(size, {s: fx.Proxy(node) for s, node in symbols.items()})
        made = list(itertools.takewhile(lambda node: node is not last, reversed(graph.nodes)))
        for node in reversed(made):
            values = fx.node.map_arg((node.args, node.kwargs), value_of)
            node.meta["example_value"] = node.target(*values[0], **values[1])  # type: ignore[operator]
        return computed.node if isinstance(computed, fx.Proxy) else computed

    def _open_contexts(self, graph: fx.Graph) -> list[fx.Node]:
        """Set the ambient autocast and gradient mode, which the subgraph itself does not set."""
        enter, _, set_grad = _torch.context_calls()
        opened = [graph.call_function(enter, node.args) for node in self.facts.autocast[self.subgraph.start]]
        if self.facts.grad_mode[self.subgraph.start] is not None:
            graph.call_function(set_grad, (self.facts.grad_mode[self.subgraph.start],))
        return opened

    def _close_contexts(self, graph: fx.Graph, opened: list[fx.Node]) -> None:
        _, leave, set_grad = _torch.context_calls()
        if self.facts.grad_mode[self.subgraph.start] is not None:
            graph.call_function(set_grad, (torch.is_grad_enabled(),))
        for node in reversed(opened):
            graph.call_function(leave, (node,))


def _node_value(node: fx.Node, facts: GraphFacts) -> Any:
    value = value_of(node)
    if value is None and node.op == "get_attr":
        return attribute_of(node, facts.graph.owning_module)
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) else []
