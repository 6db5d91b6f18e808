"""The signature of a graph: the sequence of its collectives, by process group, as every rank that fits has to have it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpasses.graphs.communication import communicates
from fxpasses.graphs.rewriting import outputs_of
from fxpasses.regional import communicating_graph

__all__ = ["CollectiveCall", "Signature", "first_difference", "names_on_every_rank", "signatures"]

Signature = tuple["CollectiveCall", ...]
_GROUPS = ("group_name", "process_group", "group")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, in words that are the same on every rank.

    Attributes:
        operator: its name, that of the form that writes into its argument being the same.
        arguments: what it is given besides tensors and the group: the kind of reduction, sizes of groups, roots.
        operands: dtype and sizes of each tensor; ``"s"`` stands for a size that is not a number.
        carries: which values it carries: the inputs that it depends on, if these are parameters and inputs of the user, and the outputs that depend
            on it. It tells two sums of equal shape apart.
    """

    operator: str
    arguments: str
    operands: tuple[str, ...]
    carries: str

    def __str__(self) -> str:
        given = ", ".join(filter(None, (*self.operands, self.arguments)))
        return f"{self.operator}({given})" + (f" of {self.carries}" if self.carries else "")

    def fits(self, other: CollectiveCall) -> bool:
        """Whether another rank may run ``other`` where this one runs this.

        >>> a = CollectiveCall("all_reduce", "'sum'", ("float32[4, s]",), "")
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[4, 8]",), ""))
        True
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[5, 8]",), ""))
        False
        """
        return (
            (self.operator, self.arguments, self.carries) == (other.operator, other.arguments, other.carries)
            and len(self.operands) == len(other.operands)
            and all(map(_same_sizes, self.operands, other.operands))
        )


def signatures(graph: fx.Graph, names: Mapping[str, str]) -> dict[str, Signature]:
    """What a graph sends, by the name of the process group.

    Args:
        graph: of ATen calls, whose nodes have values (``node.meta["val"]``).
        names: of inputs and outputs by placeholder name, or ``"output 3"``: how every rank calls them (:func:`names_on_every_rank`).
            One that is not in it is a value that only this rank's partition made, and says nothing.

    Returns:
        Per group its collectives in order.
    """
    found: dict[str, list[CollectiveCall]] = {}
    if any(_sends(node) or _region(node) for node in graph.nodes):
        given = {
            node.name: frozenset([names[node.name]])
            if node.name in names
            else None
            if isinstance(node.meta.get("val"), torch.Tensor)
            else frozenset()
            for node in graph.find_nodes(op="placeholder")
        }
        results = [frozenset(filter(None, [names.get(f"output {i}")])) for i in range(len(outputs_of(graph)))]
        _collect(graph, given, results, found)
    return {group: tuple(calls) for group, calls in found.items()}


_Names = frozenset[str]


def _collect(
    graph: fx.Graph,
    given: Mapping[str, _Names | None],
    results: Sequence[_Names],
    found: dict[str, list[CollectiveCall]],
) -> None:
    """Add the collectives of a graph, those in its regions included, in order.

    Args:
        graph: the graph.
        given: for each placeholder the named inputs that it depends on; ``None`` where it depends on one without a name.
        results: for each output the named outputs that depend on it.
        found: filled, by process group.
    """
    needs, reaches = _inputs_of(graph, given), _outputs_of(graph, results)
    for node in graph.nodes:
        inner = _region(node)
        if _sends(node):
            group, call = _described(node, needs[node], reaches[node])
            found.setdefault(group, []).append(call)
        elif inner is not None:
            tensors: list[fx.Node] = node.args[1]
            placeholders = inner.find_nodes(op="placeholder")
            sizes = len(placeholders) - len(tensors)
            at: dict[str, _Names | None] = {p.name: frozenset() for p in placeholders[:sizes]}
            at |= {p.name: needs[n] for p, n in zip(placeholders[sizes:], tensors, strict=True)}
            of = {user.args[1]: reaches[user] for user in node.users}
            _collect(inner, at, [of.get(i, frozenset()) for i in range(len(outputs_of(inner)))], found)


def _sends(node: fx.Node) -> bool:
    return node.op == "call_function" and communicates(node.target) and "wait_tensor" not in str(node.target)


def _region(node: fx.Node) -> fx.Graph | None:
    """The graph of the region that a node calls, if it has collectives."""
    return communicating_graph(node) if node.op == "call_function" else None


def names_on_every_rank(graph: fx.Graph, dynamo_inputs: Sequence[str]) -> dict[str, str]:
    """How every rank calls the inputs and outputs of a graph that AOTAutograd made: after those of the Dynamo graph.

    Values that the partition passes from the forward to the backward graph have no name: another rank may save others.

    Args:
        graph: with AOTAutograd's descriptions (``meta["desc"]``) at its placeholders and its output.
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
            for pattern, short in _SHORT:
                text = pattern.sub(short, text)
            found[key] = text
    return found


_PLAIN_INPUT = re.compile(r"PlainAOTInput\(idx=(\d+)\)")
_SHORT = (
    (re.compile(r"PlainAOTOutput\(idx=(\d+)\)"), r"output \1"),
    (re.compile(r"SubclassGetAttrAOTInput\(base=([^()]*), attr='(\w+)'\)"), r"\1"),
    (re.compile(r"TangentAOTInput\(output=([^()]*)\)"), r"gradient of \1"),
    (re.compile(r"GradAOTOutput\(grad_of=([^()]*)\)"), r"gradient of \1"),
    (re.compile(r"SubclassGetAttrAOTOutput\(base=([^()]*), attr='(\w+)'\)"), r"\1"),
)


def first_difference(ours: Sequence[CollectiveCall], theirs: Sequence[CollectiveCall]) -> int | None:
    """The number of the first collective in which two sequences do not fit, or ``None``."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not one.fits(other):
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _described(
    node: fx.Node, needs: frozenset[str] | None, reaches: frozenset[str]
) -> tuple[str, CollectiveCall]:
    schema = getattr(node.target, "_schema", None)
    keys = [argument.name for argument in schema.arguments] if schema is not None else []
    named = {**dict(zip(keys, node.args, strict=False)), **node.kwargs}
    group = next((str(named.pop(key)) for key in _GROUPS if key in named), "")
    operands = tuple(
        _written(value.meta.get("val"))
        for key in list(named)
        for value in _nodes(named.pop(key) if _nodes(named[key]) else None)
        if key != "out"
    )
    name = str(getattr(schema, "name", node.target)).split("::")[-1].removesuffix("_out").removesuffix("_")
    carries = " -> ".join(filter(None, (_short(needs or ()), _short(reaches))))
    return group, CollectiveCall(name, ", ".join(map(repr, named.values())), operands, carries)


def _short(names: Collection[str]) -> str:
    """Names, or how many there are and a digest of them."""
    text = ", ".join(sorted(names))
    if len(names) <= _SHOWN:
        return text
    return f"{len(names)} values ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_SHOWN = 3


def _nodes(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, fx.Node)]


def _written(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "?"
    sizes = ", ".join(str(size) if isinstance(size, int) else "s" for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def _same_sizes(one: str, other: str) -> bool:
    ours, theirs = (re.split(r"[\[\], ]+", text) for text in (one, other))
    return len(ours) == len(theirs) and all(
        a == b or "s" in (a, b) or "?" in (a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _inputs_of(graph: fx.Graph, given: Mapping[str, _Names | None]) -> dict[fx.Node, _Names | None]:
    """The named inputs that each value depends on; ``None`` where it depends on one without a name."""
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
    """The named outputs that depend on each value."""
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
