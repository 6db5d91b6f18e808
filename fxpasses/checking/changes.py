"""Changes: the subgraphs in which two graphs differ, made of the calls that a pass changed and those between them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from fxpasses.graphs.rewriting import constants_of, outputs_of, same_constant, subgraphs


@dataclass(frozen=True)
class Change:
    """A changed subgraph: changed calls that depend on each other directly.

    Attributes:
        before: names of the calls that the graph after has not, or has otherwise.
        after: those of the graph after.
        given: the values that the rest of the graph takes from them: pairs of names, before and after.
    """

    before: frozenset[str]
    after: frozenset[str]
    given: tuple[tuple[str, str], ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of all its calls."""
        return self.before | self.after


def changed_nodes(before: fx.GraphModule, after: fx.GraphModule) -> tuple[set[str], set[str]]:
    """Names of the nodes of each graph that the other has not, or has with another target or other arguments."""

    def described(gm: fx.GraphModule, other: fx.GraphModule | None) -> dict[str, str]:
        theirs = (subgraphs(other), constants_of(other)) if other is not None else ({}, {})
        told = {name: str(described(graph, theirs[0].get(name))) for name, graph in subgraphs(gm).items()}
        for name, value in constants_of(gm).items():
            if name in theirs[1] and not same_constant(value, theirs[1][name]):
                told[name] = f" {id(value)}"
        found = {n.name: f"{n.op} {n.target} {n.args} {n.kwargs}" for n in gm.graph.nodes}
        for node in gm.graph.nodes if told else ():
            for value in (node, *node.all_input_nodes):
                if value.op == "get_attr":
                    found[node.name] += told.get(str(value.target), "")
        return found

    old, new = described(before, after), described(after, before)
    return (
        {name for name, text in old.items() if new.get(name) != text},
        {name for name, text in new.items() if old.get(name) != text},
    )


def changes(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> list[Change]:
    """Group changed calls, in the order of the graph before.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each, as :func:`changed_nodes` finds them.
    """
    old, new = (
        _with_items(gm, set(names) - {"output"}) for gm, names in zip((before, after), changed, strict=True)
    )
    groups = _Groups()
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
        # Calls between them on one side only round on that side only, unless they run along.
        change = frozenset(mine | (inside - others)), frozenset(theirs | (others - inside))
        found.append(Change(*change, _given(before, after, *change)))
    order = {n.name: i for gm in (after, before) for i, n in enumerate(gm.graph.nodes)}
    return sorted(found, key=lambda change: min(order[name] for name in change.names))


def _with_items(gm: fx.GraphModule, names: set[str]) -> set[str]:
    """``names``, and what takes the results of these calls apart."""
    for node in gm.graph.nodes:
        if (
            node.target is operator.getitem
            and isinstance(node.args[0], fx.Node)
            and node.args[0].name in names
        ):
            names.add(node.name)
    return names


class _Groups:
    """Disjoint sets of names that grow together."""

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


def _taken_elsewhere(gm: fx.GraphModule, names: Collection[str]) -> list[str]:
    """Those of ``names`` that other nodes use (what the graph returns is not counted)."""
    return [
        n.name
        for n in gm.graph.nodes
        if n.name in names and any(u.name not in names and u.op != "output" for u in n.users)
    ]


def merge_changes(several: Sequence[Change]) -> Change:
    return Change(
        frozenset().union(*(p.before for p in several)),
        frozenset().union(*(p.after for p in several)),
        tuple(dict.fromkeys(pair for p in several for pair in p.given)),
    )


def join_changes(before: fx.GraphModule, after: fx.GraphModule, several: Sequence[Change]) -> Change:
    """Join several changes, with all calls that lie between them, to one.

    Args:
        before: the graph before.
        after: the graph after.
        several: the changes.
    """
    whole = merge_changes(several)
    between = whole.names | _between(before, whole.before) | _between(after, whole.after)
    mine, theirs = (between & {n.name for n in gm.graph.nodes} for gm in (before, after))
    return Change(mine, theirs, _given(before, after, mine, theirs))


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


def _given(
    before: fx.GraphModule, after: fx.GraphModule, mine: Collection[str], theirs: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """The values that the rest of the graph takes from changed calls: pairs of names."""
    found = {(n, n): None for n in _taken_elsewhere(after, theirs) if n in mine}
    found |= {pair: None for pair in _returned_pairs(before, after) if pair[0] in mine or pair[1] in theirs}
    return tuple(found)


def taken_pairs(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> list[tuple[str, str]] | None:
    """The values on which it depends whether two graphs return the same: pairs of names, before and after.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each.

    Returns:
        The pairs; ``None`` where the graphs return other numbers of values, or other ones that are no nodes.
    """
    results = list(zip(outputs_of(before.graph), outputs_of(after.graph), strict=False))
    if len(outputs_of(before.graph)) != len(outputs_of(after.graph)):
        return None
    if any(a != b for a, b in results if not (isinstance(a, fx.Node) and isinstance(b, fx.Node))):
        return None
    mine, theirs = (
        _with_items(gm, set(names) - {"output"}) for gm, names in zip((before, after), changed, strict=True)
    )
    moved = [(a, b) for a, b in _returned_pairs(before, after) if a != b]
    return list(dict.fromkeys([*_given(before, after, mine, theirs), *moved]))


def _returned_pairs(before: fx.GraphModule, after: fx.GraphModule) -> list[tuple[str, str]]:
    return [
        (a.name, b.name)
        for a, b in zip(outputs_of(before.graph), outputs_of(after.graph), strict=False)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node)
    ]
