"""Windows: the changes of a rewrite, cut out of both graphs, so that each can be judged alone.

A change consists of the calls that a pass changed and those between them. Its window takes values of the
graph before as inputs. If each window is the same function of its inputs, so are the graphs. And the rounding
of a window is measured where it happens, before the rest of the graph hides it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.fx import LazyGraphModule
from fxpasses._torch import OpOverload
from fxpasses.checking.execution.interpret import UNINITIALIZED, allocates
from fxpasses.exact.same_values import MASK
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.rewriting import constants_of, outputs_of, same_constant, subgraphs, value_of


@dataclass(frozen=True)
class Change:
    """A changed subgraph: changed calls that depend on each other directly.

    Attributes:
        before: names of the calls that the graph after lacks or has otherwise.
        after: those of the graph after.
        outputs: the values that the rest of the graph takes from them: pairs of names, before and after.
    """

    before: frozenset[str]
    after: frozenset[str]
    outputs: tuple[tuple[str, str], ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of all its calls."""
        return self.before | self.after


def changed_nodes(before: fx.GraphModule, after: fx.GraphModule) -> tuple[set[str], set[str]]:
    """Return the names of nodes that the other graph lacks, or has with another target or arguments.

    Dead nodes are in neither: a pass that leaves a replaced call behind has changed it.
    """
    old, new = _needed(before, _texts(before, after)), _needed(after, _texts(after, before))
    return (
        {name for name, text in old.items() if new.get(name) != text},
        {name for name, text in new.items() if old.get(name) != text},
    )


def changed_values(before: fx.GraphModule, after: fx.GraphModule) -> tuple[set[str], set[str]]:
    """Return the changed nodes whose values may differ: equal calls count once (value numbering).

    A node of the graph after that is not listed does the same as the node with its name, to the arguments with
    these names. If a graph writes to memory, all changed nodes are listed.
    """
    if any(is_mutating(node) for gm in (before, after) for node in gm.graph.nodes):
        return changed_nodes(before, after)
    first: dict[str, fx.Node] = {}
    old, new = _needed(before, _texts(before, after, first)), _needed(after, _texts(after, before, first))
    there = set(new.values())
    theirs = {name for name, text in new.items() if old.get(name) != text}
    return {name for name, text in old.items() if text not in there or name in theirs}, theirs


def _texts(
    gm: fx.GraphModule, other: fx.GraphModule, first: dict[str, fx.Node] | None = None
) -> dict[str, str]:
    """Describe each node of a graph, by name: equally for nodes that do the same.

    Args:
        gm: the graph.
        other: a graph whose constants may differ under the same names.
        first: the first call of each kind, in all graphs; updated. If given, equal calls stand for each
            other.
    """
    inside, constants = subgraphs(other), constants_of(other)
    told = {
        name: str(_texts(graph, inside[name]) if name in inside else _texts(graph, graph))
        for name, graph in subgraphs(gm).items()
    }
    for name, value in constants_of(gm).items():
        if name in constants and not same_constant(value, constants[name]):
            told[name] = f" {id(value)}"
    found: dict[str, str] = {}
    representatives: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        args = node.args, node.kwargs
        if representatives:
            args = fx.node.map_arg(args, lambda value: representatives.get(value, value))
        text = f"{node.op} {node.target} {args}"
        for value in (node, *node.all_input_nodes) if told else ():
            if value.op == "get_attr":
                text += told.get(str(value.target), "")
        if first is not None and not _is_unrepeatable(node):
            representatives[node] = first.setdefault(text, node)
        found[node.name] = text
    return found


def _is_unrepeatable(node: fx.Node) -> bool:
    """Whether repeating a call may change its value: random, impure, uninitialized, or code that may be."""
    if node.op == "get_attr":
        return False
    known = isinstance(node.target, OpOverload) or getattr(node.target, "__module__", None) == "_operator"
    return not known or uses_rng(node) or node.is_impure() or node.target in UNINITIALIZED


def _needed(gm: fx.GraphModule, texts: dict[str, str]) -> dict[str, str]:
    """The nodes that a result, a write or a random draw depends on."""
    live: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op in ("placeholder", "output") or node.is_impure() or not live.isdisjoint(node.users):
            live.add(node)
    names = {node.name for node in live}
    return {name: text for name, text in texts.items() if name in names}


def changes(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> list[Change]:
    """Group changed calls, in the order of the graph before.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each, from :func:`changed_nodes`.
    """
    old, new = (
        _with_items(gm, set(names) - {"output"}) for gm, names in zip((before, after), changed, strict=True)
    )
    groups = _DisjointSets()
    for gm, names in ((before, old), (after, new)):
        for node in gm.graph.nodes:
            if node.name in names and node.op == "call_function":
                groups.join(node.name, node.name)
                for value in node.all_input_nodes:
                    if value.name in names and value.op == "call_function":
                        groups.join(node.name, value.name)
    for a, b in _returned_pairs(before, after):
        if a in groups.of and b in groups.of:
            groups.join(a, b)
    found = []
    for group in groups.sets():
        mine, theirs = group & old, group & new
        inside, others = _between(before, mine), _between(after, theirs)
        # Calls between them on one side only would round on that side only, unless both sides run them.
        change = frozenset(mine | (inside - others)), frozenset(theirs | (others - inside))
        found.append(Change(*change, _output_pairs(before, after, *change)))
    order = {n.name: i for gm in (after, before) for i, n in enumerate(gm.graph.nodes)}
    return sorted(found, key=lambda change: min(order[name] for name in change.names))


def _with_items(gm: fx.GraphModule, names: set[str]) -> set[str]:
    """Add the ``getitem`` nodes of these calls to ``names``."""
    for node in gm.graph.nodes:
        if (
            node.target is operator.getitem
            and isinstance(node.args[0], fx.Node)
            and node.args[0].name in names
        ):
            names.add(node.name)
    return names


class _DisjointSets:
    """Disjoint sets of names that can be merged."""

    def __init__(self) -> None:
        self.of: dict[str, set[str]] = {}

    def join(self, a: str, b: str) -> None:
        one, other = self.of.setdefault(a, {a}), self.of.setdefault(b, {b})
        if one is not other:
            one |= other
            for name in other:
                self.of[name] = one

    def sets(self) -> list[set[str]]:
        return list({id(group): group for group in self.of.values()}.values())


def _used_elsewhere(gm: fx.GraphModule, names: Collection[str]) -> list[str]:
    """Those of ``names`` that other nodes use (returning them does not count)."""
    return [
        n.name
        for n in gm.graph.nodes
        if n.name in names and any(u.name not in names and u.op != "output" for u in n.users)
    ]


def merge_changes(several: Sequence[Change]) -> Change:
    return Change(
        frozenset().union(*(p.before for p in several)),
        frozenset().union(*(p.after for p in several)),
        tuple(dict.fromkeys(pair for p in several for pair in p.outputs)),
    )


def join_changes(before: fx.GraphModule, after: fx.GraphModule, several: Sequence[Change]) -> Change:
    """Join several changes, with all calls between them.

    Args:
        before: the graph before.
        after: the graph after.
        several: the changes.
    """
    whole = merge_changes(several)
    between = whole.names | _between(before, whole.before) | _between(after, whole.after)
    mine, theirs = (between & {n.name for n in gm.graph.nodes} for gm in (before, after))
    return Change(mine, theirs, _output_pairs(before, after, mine, theirs))


def with_users(before: fx.GraphModule, after: fx.GraphModule, change: Change) -> Change:
    """Extend a change by the users of its results, which may cancel what it does.

    Args:
        before: the graph before.
        after: the graph after.
        change: the change.
    """
    nodes = {node.name: node for node in before.graph.nodes}
    others = {node.name for node in after.graph.nodes}
    takers = (user for old, _ in change.outputs for user in nodes[old].users if user.op == "call_function")
    # What is written remains a result: a write has none, and a window without results would be the same
    # function whatever it does.
    users = {user.name for user in takers if not is_mutating(user)} & others
    return Change(change.before | users, change.after | users, ())


def _between(gm: fx.GraphModule, names: Collection[str]) -> set[str]:
    """The calls that depend on one of ``names`` and that another one depends on."""
    nodes = list(gm.graph.nodes)
    positions = [i for i, n in enumerate(nodes) if n.name in names]
    if len(positions) < 2:
        return set()
    below, above = set(names), set(names)
    span = nodes[positions[0] : positions[-1] + 1]
    for node in span:
        if node.op == "call_function" and any(v.name in below for v in node.all_input_nodes):
            below.add(node.name)
    for node in reversed(span):
        if node.name in below and any(u.name in above for u in node.users):
            above.add(node.name)
    return (below & above) - set(names)


def _output_pairs(
    before: fx.GraphModule, after: fx.GraphModule, mine: Collection[str], theirs: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """The values that the rest of the graph takes from changed calls: pairs of names."""
    found = {(n, n): None for n in _used_elsewhere(after, theirs) if n in mine}
    found |= {pair: None for pair in _returned_pairs(before, after) if pair[0] in mine or pair[1] in theirs}
    return tuple(found)


def compared_pairs(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> list[tuple[str, str]] | None:
    """Return the values that decide whether two graphs return the same: pairs of names, before and after.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each.

    Returns:
        The pairs; ``None`` if the graphs return different counts of values, or non-node values that differ.
    """
    results = list(zip(outputs_of(before.graph), outputs_of(after.graph), strict=False))
    if len(outputs_of(before.graph)) != len(outputs_of(after.graph)):
        return None
    if any(a != b for a, b in results if not (isinstance(a, fx.Node) and isinstance(b, fx.Node))):
        return None
    mine, theirs = (
        _with_items(gm, set(names) - {"output"}) for gm, names in zip((before, after), changed, strict=True)
    )
    is_moved = "output" in changed[1]
    moved = [(a, b) for a, b in _returned_pairs(before, after) if a != b and is_moved]
    return list(dict.fromkeys([*_output_pairs(before, after, mine, theirs), *moved]))


def _returned_pairs(before: fx.GraphModule, after: fx.GraphModule) -> list[tuple[str, str]]:
    return [
        (a.name, b.name)
        for a, b in zip(outputs_of(before.graph), outputs_of(after.graph), strict=False)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node)
    ]


_STEPS = 8
"""How many calls to follow both sides back to common inputs."""
_MAX_FIXED = 50


@dataclass(frozen=True)
class Window:
    """A change as two graphs with the same inputs.

    Attributes:
        change: the calls.
        before: the calls of the graph before. Returns what the rest of the graph takes from them.
        after: those of the graph after.
        inputs: the values of the inputs in the graph before.
    """

    change: Change
    before: fx.GraphModule
    after: fx.GraphModule
    inputs: list[Any]

    @functools.cached_property
    def key(self) -> Hashable | None:
        """Equal for windows of one graph that make the same calls of the same values; None with tensors."""
        names = tuple(n.name for n in self.before.graph.find_nodes(op="placeholder"))
        return None if None in self._structure else (names, *self._structure)

    @functools.cached_property
    def kind(self) -> Hashable | None:
        """Equal for windows with the same calls of similar values (a layer); None if they hold tensors."""
        return None if None in self._structure else (*self._structure, *map(_facts, self.inputs))

    @functools.cached_property
    def _structure(self) -> list[Hashable | None]:
        return [_structure(gm) for gm in (self.before, self.after)]


def _facts(value: Any) -> Hashable:
    """What random samples of an input depend on."""
    if not isinstance(value, Tensor):
        return repr(value)
    found: Hashable = ()
    dtype, value = value.dtype, computable(value)
    if value.is_floating_point() and value.numel():
        usual = value.isfinite() & (value.abs() < MASK)
        found = bool(usual.all()), bool((value >= 0).all()), bool((value > 0).any())
    elif value.numel() and not value.is_complex():
        is_sorted = value.dim() == 1 and value.dtype is not torch.bool and bool((value.diff() >= 0).all())
        found = value.min().item(), value.max().item(), is_sorted
    return value.shape, dtype, value.device, found


def _structure(gm: fx.GraphModule) -> Hashable | None:
    if gm.graph.find_nodes(op="get_attr"):
        return None
    numbers = {node: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    return tuple(
        (node.op, str(node.target), str(fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)))
        for node in gm.graph.nodes
        if node.op != "placeholder"
    )


def can_be_cut(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> bool:
    """Whether the changes are pure: no RNG, writes or uninitialized memory. Others must keep their order.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each.
    """
    order = []
    for gm, names in zip((before, after), changed, strict=True):
        special = [n for n in gm.graph.nodes if n.op == "call_function" and (uses_rng(n) or is_mutating(n))]
        if any(n.name in names for n in special) or allocates(gm, names):
            return False
        order.append([n.name for n in special])
    return order[0] == order[1]


def cut(
    before: fx.GraphModule, after: fx.GraphModule, change: Change, values: Mapping[str, Any]
) -> Window | None:
    """Make a window of a change.

    Args:
        before: the graph before.
        after: the graph after.
        change: what changed.
        values: the values of the graph before, by name.

    Returns:
        The window; ``None`` if it would take values that are not tensors or numbers.
    """
    names = [set(change.before), set(change.after)]
    wanted = [[pair[side] for pair in change.outputs] for side in (0, 1)]
    graphs = [{node.name: node for node in gm.graph.nodes} for gm in (before, after)]
    for step in itertools.count():
        parts = [_own_and_input_nodes(*side) for side in zip(graphs, names, wanted, strict=True)]
        taken = [part[1] for part in parts]
        # An input of only one side may be computed from inputs of the other. And inputs may not be tuples.
        odd = {
            name
            for mine, others in (taken, taken[::-1])
            for name, node in mine.items()
            if node.op == "call_function"
            and not _must_stay_outside(node)
            and (
                isinstance(values.get(name), (list, tuple))
                or (name not in others and (step < _STEPS or _is_input_independent(node)))
            )
        }
        if not odd:
            break
        for side in names:
            side |= odd.difference(
                *(_ancestors_among([graph[name] for name in odd if name in graph]) for graph in graphs)
            )
    inputs = {**taken[0], **taken[1]}
    if any(isinstance(values.get(name), (list, tuple)) or name not in values for name in inputs):
        return None
    made = [
        _part(gm, part[0], inputs, out) for gm, part, out in zip((before, after), parts, wanted, strict=True)
    ]
    return Window(change, made[0], made[1], [values[name] for name in inputs])


def _ancestors_among(nodes: Sequence[fx.Node]) -> set[str]:
    """The names of those nodes that another of them is computed from: following that one may reach them."""
    seen: set[fx.Node] = set()
    queue = [value for node in nodes for value in node.all_input_nodes]
    while queue:
        value = queue.pop()
        if value not in seen:
            seen.add(value)
            queue += [source for source in value.all_input_nodes if not source < min(nodes)]
    return {node.name for node in nodes if node in seen}


def _must_stay_outside(node: fx.Node) -> bool:
    """Whether a call must stay outside windows: it calls the RNG or writes, or unpacks such a call."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and (uses_rng(source) or is_mutating(source))


def _is_input_independent(node: fx.Node) -> bool:
    """Whether a call depends on no input, through few calls: both sides know its value."""
    seen, queue = {node}, [node]
    while queue:
        for value in queue.pop().all_input_nodes:
            if value.op == "placeholder" or len(seen) > _MAX_FIXED:
                return False
            if value not in seen:
                seen.add(value)
                queue.append(value)
    return True


def _own_and_input_nodes(
    nodes: Mapping[str, fx.Node], names: Collection[str], outputs: Collection[str]
) -> tuple[set[str], dict[str, fx.Node]]:
    """What a part of a graph computes its outputs with: names of its own nodes, and the others it takes."""
    inside: set[str] = set()
    taken: dict[str, fx.Node] = {}
    queue = [nodes[name] for name in reversed(list(outputs))]
    while queue:
        node = queue.pop()
        if node.name in inside or node.name in taken:
            continue
        if node.name not in names and node.op != "get_attr":
            taken[node.name] = node
            continue
        inside.add(node.name)
        queue += reversed(node.all_input_nodes)
    return inside, taken


def _part(
    gm: fx.GraphModule, names: Collection[str], inputs: Mapping[str, fx.Node], outputs: Sequence[str]
) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for name in inputs:
        made[name] = graph.placeholder(name)
    for node in gm.graph.nodes:
        if node.name in names and node.name not in made:
            made[node.name] = graph.node_copy(node, lambda n: made[n.name])
            made[node.name].meta = {"val": value_of(node)}
    for name, node in inputs.items():
        made[name].meta = (
            {**node.meta, "val": value_of(node)} if node.op == "placeholder" else {"val": value_of(node)}
        )
    graph.output(tuple(made[name] for name in outputs))
    return LazyGraphModule(gm, graph)
