"""The signature of a graph: the sequence of its collectives, by process group, as every rank that fits has to have it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxpasses.distributed.carried_values import GROUPS, Carried, carried, region_of, sends
from fxpasses.graphs.rewriting import outputs_of

Signature = tuple["CollectiveCall", ...]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, in words that are the same on every rank.

    Attributes:
        operator: its name, that of the form that writes into its argument being the same.
        arguments: what it is given besides tensors and the group: the kind of reduction, sizes of groups, roots.
        operands: dtype and sizes of each tensor; ``"<0>"`` stands for an expression of :class:`SymbolicSizes`, ``"?"`` for what may be anything.
        carries: which values it carries: the inputs that it depends on, if these are parameters and inputs of the user, and the outputs that depend
            on it. It tells two sums of equal shape apart.
        after: how many collectives of other groups that all ranks of this one are in come before it in the graph (:func:`interleaved`).
        position: its number among all collectives of this rank's graph.
        source: the part of ``carries`` that tells what it is computed from.
        results: the outputs that depend on it.
        returned: how many outputs the graph has that all ranks call the same.
        computed: of several that are alike in all of this, how each one is computed, and what is computed of it: a digest, without numbers.
        exactly: with the numbers of what it is computed from.
        text: how it is computed, for people.
    """

    operator: str
    arguments: str
    operands: tuple[str, ...]
    carries: str
    after: str = ""
    position: int = dataclasses.field(default=0, compare=False, repr=False)
    source: str = dataclasses.field(default="", compare=False, repr=False)
    results: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    returned: int = dataclasses.field(default=0, compare=False, repr=False)
    computed: str = dataclasses.field(default="", compare=False)
    exactly: str = dataclasses.field(default="", compare=False, repr=False)
    text: str = dataclasses.field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        given = ", ".join(filter(None, (*self.operands, self.arguments)))
        source = f" of {self.carries}" if self.carries else ""
        more = (f" = {self.text}" if self.text else "", source, f" after {self.after}" if self.after else "")
        return f"{self.operator}({given})" + "".join(more)

    def of_other_inputs(self) -> CollectiveCall:
        """As it can be compared with that of a graph which has other inputs, as one rank broke its graph elsewhere."""
        return dataclasses.replace(self, carries="", after="", computed="", exactly="", text="")

    def fits(self, other: CollectiveCall) -> bool:
        """Whether another rank may run ``other`` where this one runs this.

        >>> a = CollectiveCall("all_reduce", "'sum'", ("float32[4, ?]",), "")
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[4, 8]",), ""))
        True
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[5, 8]",), ""))
        False
        """
        return (
            (self.operator, self.arguments, self.after) == (other.operator, other.arguments, other.after)
            and self._carries_what(other)
            and len(self.operands) == len(other.operands)
            and all(map(_same_sizes, self.operands, other.operands))
        )

    def _carries_what(self, other: CollectiveCall) -> bool:
        """Whether both carry the same value: more may depend on it in the graph of a rank that returns more."""
        if self.carries == other.carries or self.source != other.source or self.returned == other.returned:
            return self.carries == other.carries
        mine, theirs = set(self.results), set(other.results)
        return bool(mine and theirs) and (mine <= theirs or theirs <= mine)


class SymbolicSizes:
    """The symbolic sizes of a graph's collectives, and which of its inputs show what they are at a call."""

    def __init__(self, graph: fx.Graph, names: Mapping[str, str]) -> None:
        """Find the inputs that show symbols.

        Args:
            graph: of ATen calls.
            names: of its inputs, as for :func:`signatures`.
        """
        self._expressions: list[sympy.Expr] = []
        self._shown_by: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self._named: dict[sympy.Symbol, str] = {}
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._shown_by.setdefault(value.node.expr, (position, None))
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._shown_by.setdefault(size.node.expr, (position, dim))
                        if names.get(node.name):
                            self._named.setdefault(size.node.expr, f"dimension {dim} of {names[node.name]}")

    def written(self, size: Any, bound: Mapping[sympy.Symbol, Any]) -> str:
        """A size as it stands in a signature.

        Args:
            size: an integer or a symbolic one.
            bound: what symbols of a region's graph stand for in the graph that calls it.
        """
        if isinstance(size, int):
            return str(size)
        expression = sympy.sympify(size.node.expr).xreplace(bound)
        if expression.is_Integer:
            return str(expression)
        if expression not in self._expressions:
            self._expressions.append(expression)
        return f"<{self._expressions.index(expression)}>"

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._expressions)

    def of_call(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of the symbols in a call's collectives; nothing where all sizes are numbers."""
        if not self._expressions:
            return ()
        shown = (self._shown_by[symbol] for symbol in self._symbols())
        return tuple(
            int(inputs[position] if dim is None else inputs[position].shape[dim]) for position, dim in shown
        )

    def _symbols(self) -> list[sympy.Symbol]:
        free = {symbol for expression in self._expressions for symbol in expression.free_symbols}
        return [symbol for symbol in self._shown_by if symbol in free]

    def named(self, values: Sequence[int]) -> dict[str, int]:
        """Values of a call by what every rank calls them, where it has a name."""
        pairs = zip(self._symbols(), values, strict=True)
        return {self._named[symbol]: value for symbol, value in pairs if symbol in self._named}

    def at(self, signature: Signature, values: Sequence[int]) -> Signature:
        """A signature with its sizes at a call; one that no input shows stays ``"?"``.

        Args:
            signature: one that was written with this.
            values: from :meth:`of_call`.
        """
        if not self._expressions:
            return signature
        given = dict(zip(self._symbols(), map(sympy.Integer, values), strict=True))
        found = [expression.xreplace(given) for expression in self._expressions]
        texts = [str(value) if value.is_Integer else "?" for value in found]

        def number(match: re.Match[str]) -> str:
            return texts[int(match[1])]

        return tuple(
            dataclasses.replace(call, operands=tuple(_SYMBOLIC.sub(number, text) for text in call.operands))
            for call in signature
        )


_SYMBOLIC = re.compile(r"<(\d+)>")


def signatures(
    graph: fx.Graph, names: Mapping[str, str], sizes: SymbolicSizes | None = None
) -> dict[str, Signature]:
    """What a graph sends, by the name of the process group.

    Args:
        graph: of ATen calls, whose nodes have values (``node.meta["val"]``).
        names: of inputs and outputs by placeholder name, or ``"output 3"``: how every rank calls them (:func:`names_on_every_rank`).
            One that is not in it is a value that only this rank's partition made, and says nothing.
        sizes: takes the symbolic sizes; those of this graph, or of one with the same inputs.

    Returns:
        Per group its collectives in order.
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
        if any(max(Counter(map(_alike, calls)).values()) > 1 for calls in found.values()):
            what = carried(graph, names)
            found = {group: _told_apart(calls, what) for group, calls in found.items()}
    return {group: tuple(calls) for group, calls in found.items()}


def _alike(call: CollectiveCall) -> tuple[Any, ...]:
    """What two collectives have in common that can take each other's place."""
    return call.operator, call.arguments, call.operands, call.carries


def _told_apart(calls: Sequence[CollectiveCall], what: Sequence[Carried | None]) -> list[CollectiveCall]:
    """Collectives of a group, with what those carry that are alike. Args: the calls, and what all of the graph carry, by position."""
    several = Counter(map(_alike, calls))
    return [
        dataclasses.replace(call, computed=value.loosely, exactly=value.exactly, text=value.text)
        if several[_alike(call)] > 1 and (value := what[call.position]) is not None
        else call
        for call in calls
    ]


def interleaved(
    found: Mapping[str, Signature], groups: Mapping[str, tuple[str, Sequence[int]]]
) -> dict[str, Signature]:
    """Signatures that tell in which order a graph speaks in several groups, where ranks have more than one in common: one that waits in the first stops one that waits in the second.

    Args:
        found: what a graph sends, by the name of the process group.
        groups: what every rank calls a group, and its ranks, by that name.
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
            dataclasses.replace(call, after=", ".join(_before(call.position, sorted(wider))))
            for call in found[group]
        )
    return told


def _before(position: int, others: Sequence[tuple[str, list[int]]]) -> list[str]:
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
    """Add the collectives of a graph, those in its regions included, in order.

    Args:
        graph: the graph.
        given: for each placeholder the named inputs that it depends on; ``None`` where it depends on one without a name.
        results: for each output the named outputs that depend on it.
        found: filled, by process group.
        sizes: takes the symbolic sizes.
        bound: what symbols of this graph stand for in the outermost one.
    """
    needs, reaches = _inputs_of(graph, given), _outputs_of(graph, results)
    for node in graph.nodes:
        inner = region_of(node)
        if sends(node):
            written = {v: _written(v.meta.get("val"), sizes, bound) for v in node.all_input_nodes}
            group, call = _described(node, needs[node], reaches[node], written)
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
    """What a region is given as a size, in symbols of the outermost graph."""
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    return value.node.expr.xreplace(bound) if isinstance(value, torch.SymInt) else sympy.Integer(value)


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
    return _moved(ours, theirs) if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _moved(ours: Sequence[CollectiveCall], theirs: Sequence[CollectiveCall]) -> int | None:
    """The number of the first of several collectives that fit, and carry on one rank what others of them do on the other, or ``None``.

    What no other one carries may be computed in another way there: of a shard of another size, say.
    """
    alike: dict[Any, list[tuple[int, CollectiveCall, CollectiveCall]]] = {}
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.carries == b.carries and a.computed and b.computed:
            alike.setdefault((a.operator, a.arguments, a.carries, a.after), []).append((number, a, b))
    moved = []
    for calls in alike.values():
        for values in (
            [(n, (*a.operands, a.computed), (*b.operands, b.computed)) for n, a, b in calls],
            [(n, (*a.operands, a.exactly), (*b.operands, b.exactly)) for n, a, b in calls],
        ):
            left, before = [value for value in values if value[1] != value[2]], -1
            while len(left) != before:
                before = len(left)
                both = {a for _, a, _ in left} & {b for _, _, b in left}
                left = [value for value in left if both.issuperset(value[1:])]
            moved += [number for number, *_ in left[:1]]
    return min(moved, default=None)


def _described(
    node: fx.Node, needs: frozenset[str] | None, reaches: frozenset[str], written: Mapping[fx.Node, str]
) -> tuple[str, CollectiveCall]:
    schema = getattr(node.target, "_schema", None)
    keys = [argument.name for argument in schema.arguments] if schema is not None else []
    named = {**dict(zip(keys, node.args, strict=False)), **node.kwargs}
    group = next((str(named.pop(key)) for key in GROUPS if key in named), "")
    if [key for key in _SPLITS if named.pop(key, None) is not None]:
        # What each rank sends to which is its own; the sizes of the others follow from that.
        written = {value: _FIRST_SIZE.sub("[?", text) for value, text in written.items()}
    operands = tuple(
        written[value]
        for key in list(named)
        for value in _nodes(named.pop(key) if _nodes(named[key]) else None)
        if key != "out"
    )
    name = str(getattr(schema, "name", node.target)).split("::")[-1].removesuffix("_out").removesuffix("_")
    source = _short(needs or ())
    carries = " -> ".join(filter(None, (source, _short(reaches))))
    arguments = ", ".join(map(repr, named.values()))
    results = tuple(sorted(reaches))
    return group, CollectiveCall(name, arguments, operands, carries, source=source, results=results)


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


_SPLITS = ("output_split_sizes", "input_split_sizes")
_FIRST_SIZE = re.compile(r"\[[^,\]]+")


def _written(value: Any, sizes: SymbolicSizes, bound: Mapping[sympy.Symbol, Any]) -> str:
    if not isinstance(value, torch.Tensor):
        return "?"
    shape = ", ".join(sizes.written(size, bound) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _same_sizes(one: str, other: str) -> bool:
    ours, theirs = (re.split(r"[\[\], ]+", text) for text in (one, other))
    return len(ours) == len(theirs) and all(
        a == b or "?" in (a, b) or a.startswith("<") or b.startswith("<")
        for a, b in zip(ours, theirs, strict=True)
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
