"""The signature of a graph: its collectives in order, by process group, which must fit on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fake.seam.symbolic_shapes import text_of_size
from fxpasses.distributed.carried_values import GROUPS, CarriedValues, carried, region_of, sends
from fxpasses.distributed.collective_call import CollectiveCall, Signature
from fxpasses.graphs.rewriting import outputs_of


class SymbolicSizes:
    """The symbolic sizes of a graph's collectives, and the inputs that have their values at a call."""

    def __init__(self, graph: fx.Graph, names: Mapping[str, str]) -> None:
        """Find the inputs that have the values of symbols.

        Args:
            graph: the graph of ATen calls.
            names: names of its inputs, as for :func:`signatures`.
        """
        self._expressions: list[sympy.Expr] = []
        self._symbol_sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self._named: dict[sympy.Symbol, str] = {}
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._symbol_sources.setdefault(value.node.expr, (position, None))
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._symbol_sources.setdefault(size.node.expr, (position, dim))
                        if names.get(node.name):
                            self._named.setdefault(size.node.expr, f"dimension {dim} of {names[node.name]}")

    def written(self, size: Any, bound: Mapping[sympy.Symbol, Any]) -> str:
        """Return a size as written in a signature.

        Args:
            size: an integer or a symbolic one.
            bound: maps symbols of a region's graph to their values in the calling graph.
        """
        if isinstance(size, int):
            return str(size)
        expression = sympy.sympify(size.node.expr).xreplace(bound)
        if expression.is_Integer:
            return str(expression)
        if expression not in self._expressions:
            self._expressions.append(expression)
        return f"<{self._expressions.index(expression)}>"

    def of_calls(self) -> str:
        """Return code that recreates the :class:`SizesOfCalls` of what was written, for a plan."""
        if not self._expressions:
            return "SizesOfCalls()"
        free = {symbol for expression in self._expressions for symbol in expression.free_symbols}
        symbols = [symbol for symbol in self._symbol_sources if symbol in free]
        given = {symbol: sympy.Symbol(f"s{i}", integer=True) for i, symbol in enumerate(symbols)}
        values = [
            text_of_size(expression.xreplace(given)) if expression.free_symbols <= given.keys() else "None"
            for expression in self._expressions
        ]
        shown = [self._symbol_sources[symbol] for symbol in symbols]
        names = [self._named.get(symbol, "") for symbol in symbols]
        parameters = ", ".join(map(str, given.values()))
        return f"SizesOfCalls({shown!r}, {names!r}, lambda {parameters}: ({''.join(f'{value}, ' for value in values)}))"


def signatures(
    graph: fx.Graph, names: Mapping[str, str], sizes: SymbolicSizes | None = None
) -> dict[str, Signature]:
    """Return what a graph sends, by the name of the process group.

    Args:
        graph: the graph of ATen calls, whose nodes have values (``node.meta["val"]``).
        names: rank-independent names (:func:`names_on_every_rank`) of inputs, by placeholder name, and
            outputs, by ``"output 3"``. A value that is not in it was created by this rank's partition, and
            says nothing.
        sizes: collects the symbolic sizes, of this graph or one with the same inputs.

    Returns:
        The collectives of each group, in order.
    """
    found: dict[str, list[CollectiveCall]] = {}
    sizes = sizes or SymbolicSizes(graph, names)
    if any(sends(node) or region_of(node) for node in graph.nodes):
        given = {
            node.name: None
            if isinstance(node.meta.get("val"), torch.Tensor) and node.name not in names
            else frozenset(filter(None, [names.get(node.name)]))
            for node in graph.find_nodes(op="placeholder")
        }
        results = [frozenset(filter(None, [names.get(f"output {i}")])) for i in range(len(outputs_of(graph)))]
        _collect(graph, given, results, found, sizes, {})
        count = sum(map(bool, results))
        found = {
            group: [dataclasses.replace(c, returned=count) for c in calls] for group, calls in found.items()
        }
        if any(max(Counter(map(_replacement_key, calls)).values()) > 1 for calls in found.values()):
            what = carried(graph, names)
            found = {group: _with_carried_values(calls, what) for group, calls in found.items()}
    return {group: tuple(calls) for group, calls in found.items()}


def _replacement_key(call: CollectiveCall) -> tuple[Any, ...]:
    """Return what is equal for two collectives that could replace each other."""
    return call.operator, call.arguments, call.operands, call.carries


def _with_carried_values(
    calls: Sequence[CollectiveCall], what: Sequence[CarriedValues | None]
) -> list[CollectiveCall]:
    """Add to a group's alike collectives what they carry. Args: calls, and what all carry by position."""
    several = Counter(map(_replacement_key, calls))
    return [
        dataclasses.replace(call, computed=value.loosely, exactly=value.exactly, text=value.text)
        if several[_replacement_key(call)] > 1 and (value := what[call.position]) is not None
        else call
        for call in calls
    ]


def interleaved(
    found: Mapping[str, Signature], groups: Mapping[str, tuple[str, Sequence[int]]]
) -> dict[str, Signature]:
    """Record in signatures the order across groups, where ranks have more than one in common.

    A rank that waits in the first group blocks one that waits in the second.

    Args:
        found: what a graph sends, by the name of the process group.
        groups: the name of a group on every rank, and its ranks, by that name.
    """
    told = dict(found)
    for group in found.keys() & groups.keys():
        ranks = set(groups[group][1])
        wider = [
            (name, [call.position for call in found[other]])
            for other, (name, others) in groups.items()
            if other != group and other in found and len(ranks) > 1 and ranks.issubset(others)
        ]
        told[group] = tuple(
            dataclasses.replace(call, after=", ".join(_preceding_collectives(call.position, sorted(wider))))
            for call in found[group]
        )
    return told


def _preceding_collectives(position: int, others: Sequence[tuple[str, list[int]]]) -> list[str]:
    counts = [(name, sum(other < position for other in positions)) for name, positions in others]
    return [f"{count} of group {name}" for name, count in counts if count]


_Names = frozenset[str]


def _collect(
    graph: fx.Graph,
    given: Mapping[str, _Names | None],
    results: Sequence[_Names],
    found: dict[str, list[CollectiveCall]],
    sizes: SymbolicSizes,
    bound: Mapping[sympy.Symbol, Any],
) -> None:
    """Add the collectives of a graph, including those in its regions, in order.

    Args:
        graph: the graph.
        given: for each placeholder the named inputs that it depends on; ``None`` if it depends on one without
            a name.
        results: for each output the named outputs that depend on it.
        found: filled, by process group.
        sizes: collects the symbolic sizes.
        bound: maps symbols of this graph to their values in the outermost one.
    """
    needs, reaches = _inputs_of(graph, given), _outputs_of(graph, results)
    for node in graph.nodes:
        inner = region_of(node)
        if sends(node):
            written = {v: _operand_text(v.meta.get("val"), sizes, bound) for v in node.all_input_nodes}
            group, call = _collective_call(node, needs[node], reaches[node], written)
            call = dataclasses.replace(call, position=sum(map(len, found.values())))
            found.setdefault(group, []).append(call)
        elif inner is not None:
            tensors: list[fx.Node] = node.args[1]
            placeholders = inner.find_nodes(op="placeholder")
            count = len(placeholders) - len(tensors)
            at: dict[str, _Names | None] = {p.name: frozenset() for p in placeholders[:count]}
            at |= {p.name: needs[n] for p, n in zip(placeholders[count:], tensors, strict=True)}
            of = {user.args[1]: reaches[user] for user in node.users}
            within = {
                p.meta["val"].node.expr: _expression(size, bound)
                for p, size in zip(placeholders[:count], node.args[2], strict=True)
                if isinstance(p.meta.get("val"), torch.SymInt)
            }
            results_of = [of.get(i, frozenset()) for i in range(len(outputs_of(inner)))]
            _collect(inner, at, results_of, found, sizes, within)


def _expression(size: Any, bound: Mapping[sympy.Symbol, Any]) -> Any:
    """Return a size that is passed to a region, in symbols of the outermost graph."""
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    return value.node.expr.xreplace(bound) if isinstance(value, torch.SymInt) else sympy.Integer(value)


def names_on_every_rank(graph: fx.Graph, dynamo_inputs: Sequence[str]) -> dict[str, str]:
    """Name inputs and outputs of an AOTAutograd graph as all ranks do: after those of the Dynamo graph.

    Values that the partition passes from the forward to the backward graph have no name: another rank may
    save others.

    Args:
        graph: the graph, with AOTAutograd's descriptions (``meta["desc"]``) on its placeholders and its
            output.
        dynamo_inputs: the names of the Dynamo graph's inputs, in order.
    """
    (output,) = graph.find_nodes(op="output")
    described = {node.name: node.meta.get("desc") for node in graph.find_nodes(op="placeholder")}
    described |= {f"output {i}": desc for i, desc in enumerate(output.meta.get("desc") or ())}

    def of_dynamo(match: re.Match[str]) -> str:
        position = int(match[1])
        return dynamo_inputs[position] if position < len(dynamo_inputs) else f"input {position}"

    found = {}
    for key, desc in described.items():
        text = _PLAIN_INPUT.sub(of_dynamo, repr(desc))
        if desc is not None and "Saved" not in text:
            for pattern, short in _ABBREVIATIONS:
                text = pattern.sub(short, text)
            found[key] = text
    return found


_PLAIN_INPUT = re.compile(r"PlainAOTInput\(idx=(\d+)\)")
_ABBREVIATIONS = (
    (re.compile(r"PlainAOTOutput\(idx=(\d+)\)"), r"output \1"),
    (re.compile(r"SubclassGetAttrAOTInput\(base=([^()]*), attr='(\w+)'\)"), r"\1"),
    (re.compile(r"TangentAOTInput\(output=([^()]*)\)"), r"gradient of \1"),
    (re.compile(r"GradAOTOutput\(grad_of=([^()]*)\)"), r"gradient of \1"),
    (re.compile(r"SubclassGetAttrAOTOutput\(base=([^()]*), attr='(\w+)'\)"), r"\1"),
)


def _collective_call(
    node: fx.Node, needs: frozenset[str] | None, reaches: frozenset[str], written: Mapping[fx.Node, str]
) -> tuple[str, CollectiveCall]:
    schema = getattr(node.target, "_schema", None)
    keys = [argument.name for argument in schema.arguments] if schema is not None else []
    named = {**dict(zip(keys, node.args, strict=False)), **node.kwargs}
    group = next((str(named.pop(key)) for key in GROUPS if key in named), "")
    if [key for key in _SPLITS if named.pop(key, None) is not None]:
        # Split sizes are specific to each rank, and determine the first dimension of the operands.
        written = {value: _FIRST_SIZE.sub("[?", text) for value, text in written.items()}
    operands = tuple(
        written[value]
        for key in list(named)
        for value in _nodes(named.pop(key) if _nodes(named[key]) else None)
        if key != "out"
    )
    name = str(getattr(schema, "name", node.target)).split("::")[-1].removesuffix("_out").removesuffix("_")
    source = _summarize_names(needs or ())
    carries = " -> ".join(filter(None, (source, _summarize_names(reaches))))
    arguments = ", ".join(map(repr, named.values()))
    results = tuple(sorted(reaches))
    return group, CollectiveCall(name, arguments, operands, carries, source=source, results=results)


def _summarize_names(names: Collection[str]) -> str:
    """Return the names, or their number and a digest."""
    text = ", ".join(sorted(names))
    if len(names) <= _SHOWN:
        return text
    return f"{len(names)} values ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_SHOWN = 3


def _nodes(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, fx.Node)]


_SPLITS = ("output_split_sizes", "input_split_sizes")
_FIRST_SIZE = re.compile(r"\[[^,\]]+")


def _operand_text(value: Any, sizes: SymbolicSizes, bound: Mapping[sympy.Symbol, Any]) -> str:
    if not isinstance(value, torch.Tensor):
        return "?"
    shape = ", ".join(sizes.written(size, bound) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _inputs_of(graph: fx.Graph, given: Mapping[str, _Names | None]) -> dict[fx.Node, _Names | None]:
    """Return the named inputs that each value depends on; ``None`` if it depends on one without a name."""
    found: dict[fx.Node, _Names | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = given[node.name]
            continue
        needed = [found[value] for value in node.all_input_nodes]
        found[node] = (
            None if None in needed else frozenset().union(*(part for part in needed if part is not None))
        )
    return found


def _outputs_of(graph: fx.Graph, results: Sequence[_Names]) -> dict[fx.Node, _Names]:
    """Return the named outputs that depend on each value."""
    found: dict[fx.Node, set[str]] = {}
    for value, names in zip(outputs_of(graph), results, strict=True):
        if isinstance(value, fx.Node):
            found.setdefault(value, set()).update(names)
    for node in reversed(graph.nodes):
        if node.op != "output":
            for user in node.users:
                if user.op != "output":
                    found.setdefault(node, set()).update(found.get(user, ()))
    return {node: frozenset(found.get(node, ())) for node in graph.nodes}
