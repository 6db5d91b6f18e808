"""Which writes each node of a graph can see, and whether a rewrite makes a node read memory at another time.

Every write to memory creates a new *version* of it. A node *sees* a version if it reads it, or reads a value
computed from it. After a rewrite, a remaining node may see less (``x - x`` became zero), but not another
version of the same memory. That would be a read that moved across a write, or a copy that was removed
although it was needed.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx

from fxpasses.graphs.aliasing import AliasInfo, is_alias, reads_only_metadata
from fxpasses.pass_manager.runs import Snapshot

Version = tuple[fx.Node, fx.Node | None]
"""The memory of a root after a write to it, or in its initial state if the write is ``None``."""


class Memory:
    """The writes of one graph, and the versions that each node sees.

    Attributes:
        seen: for each node that reads, the versions that it sees.
        final: for each root that is written to, the versions left in it at the end.
        writes: for each root that is written to, its writes, in order.
        position: the index of each node in the graph.
    """

    def __init__(self, graph: fx.Graph, aliases: AliasInfo, writes: list[fx.Node]) -> None:
        self.aliases = aliases
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        for write in writes:
            for root in aliases.written_by(write):
                self.writes.setdefault(root, []).append(write)
        self.seen: dict[fx.Node, frozenset[Version]] = {}
        self.position: dict[fx.Node, int] = {}
        writing = set(writes)
        contents: dict[fx.Node, frozenset[Version]] = {}
        """The versions in the memory of each root at this point of the walk."""
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            if not node.all_input_nodes:
                contents[node] = frozenset([(node, None)] if node in self.writes else ())
                continue
            read = [] if reads_only_metadata(node) else node.all_input_nodes
            seen: frozenset[Version] = frozenset().union(
                *(contents[root] for value in read for root in aliases.roots(value))
            )
            written = aliases.written_by(node) if node in writing else frozenset()
            self.seen[node] = seen
            if node.op == "output":
                break
            for root in written:
                # A version stands for all that led to it, so earlier contents of this memory are not listed
                # again.
                others = frozenset(v for v in seen | contents[root] if v[0] is not root)
                contents[root] = others | {(root, node)}
            if node in aliases.roots(node):
                contents[node] = seen | (frozenset([(node, None)]) if node in self.writes else frozenset())
        self.final = {root: contents[root] for root in self.writes}


def stale_read(
    graph: fx.Graph, snapshot: Snapshot, before: Memory | None, after: Memory | None
) -> tuple[fx.Node, str] | None:
    """Find the first node that reads memory at another time than before the pass.

    Args:
        graph: the rewritten graph.
        snapshot: the graph before.
        before: writes and reads of the graph before; ``None`` if it has no writes.
        after: writes and reads of the rewritten graph; ``None`` if it has no writes.

    Returns:
        The node and a description of the problem, or ``None``.
    """
    known = snapshot.by_node
    same_write = _matching_writes(before, after)
    behind = _depending_on_new_calls(graph, known) if before is not None and after is not None else set()
    for node in graph.nodes:
        old = known.get(node)
        if old is None:
            continue
        if (
            before is not None
            and after is not None
            and (found := _unexpected_read(node, before, after, same_write, node in behind))
        ):
            return node, found
        if after is not None and (found := _newly_overwritten(node, old.args, after, same_write)):
            return node, found
    if before is not None and after is not None:
        for new, write in same_write.items():
            if new is not write and (
                found := _unexpected_version(
                    after.seen[new], before.seen[write], before, same_write, new in behind
                )
            ):
                return new, found
        for root in after.writes.keys() & before.writes.keys():
            last = after.writes[root][-1] in behind
            if found := _unexpected_version(after.final[root], before.final[root], before, same_write, last):
                return after.writes[root][-1], f"what is left in {root.name} is not the same: {found}"
    return None


def _matching_writes(before: Memory | None, after: Memory | None) -> dict[fx.Node, fx.Node]:
    """Map each write after the pass to the write before it that it is or replaces."""
    if before is None or after is None:
        return {}
    found: dict[fx.Node, fx.Node] = {}
    for root, writes in after.writes.items():
        old = before.writes.get(root, [])
        found.update((write, write) for write in writes if write in old)
        new, gone = [w for w in writes if w not in old], [w for w in old if w not in writes]
        if len(new) == len(gone):
            found.update(zip(new, gone, strict=True))
    return found


def _depending_on_new_calls(graph: fx.Graph, known: Container[fx.Node]) -> set[fx.Node]:
    """The calls that are new or depend on a new call."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in known or any(value in found for value in node.all_input_nodes):
            found.add(node)
    return found


def _unexpected_read(
    node: fx.Node, before: Memory, after: Memory, same_write: dict[fx.Node, fx.Node], on_new_calls: bool
) -> str | None:
    """Describe a version that ``node`` sees now and did not see before, if there is one."""
    if node.op != "output" and is_alias(node) and node not in same_write:
        return None  # a view reads nothing; its users do
    now, was = after.seen.get(node, frozenset()), before.seen.get(node, frozenset())
    return _unexpected_version(now, was, before, same_write, on_new_calls)


def _unexpected_version(
    now: frozenset[Version],
    was: frozenset[Version],
    before: Memory,
    same_write: dict[fx.Node, fx.Node],
    on_new_calls: bool = False,
) -> str | None:
    """Describe a version among ``now`` that was not among ``was``.

    With ``on_new_calls``, the node may additionally read memory that it did not depend on before. A rewrite
    that merges several calls (one concatenation for many reductions) makes each result depend on all of their
    inputs.
    """
    known = {root for root, _ in was}
    translated = {(root, same_write.get(write) if write is not None else None) for root, write in now}
    reads_more = on_new_calls and was <= translated
    for root, write in now:
        if reads_more and root not in known:
            continue
        if root not in before.writes or (write is not None and write not in same_write):
            continue
        if (root, same_write[write] if write is not None else None) not in was:
            return _describe(root, write, [w for r, w in was if r is root])
    return None


def _describe(root: fx.Node, write: fx.Node | None, was: list[fx.Node | None]) -> str:
    now = f"after {write.name} has written to it" if write is not None else "as it was at first"
    if not was:
        return f"it reads the memory of {root.name} {now}, from which it was independent before"
    return f"it reads the memory of {root.name} {now}, and read it at another time before: a read was moved across a write, or a copy removed that kept them apart"


def _newly_overwritten(
    node: fx.Node, old_args: Any, after: Memory, same_write: dict[fx.Node, fx.Node]
) -> str | None:
    """Describe a new write to an argument that ``node`` had before, if it runs ahead of ``node``'s read."""
    kept: set[fx.Node] = set()
    fx.node.map_arg(old_args, lambda n: kept.add(n) or n)  # type: ignore[func-returns-value]
    for value in node.all_input_nodes:
        if value not in kept or reads_only_metadata(node):
            continue
        for root in after.aliases.roots(value):
            for write in after.writes.get(root, ()):
                if write in same_write or write is node:
                    continue
                if after.position[value] < after.position[write] < after.position[node]:
                    return f"it reads {value.name}, whose memory {write.name} overwrites now"
    return None
