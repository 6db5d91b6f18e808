"""Provenance of nodes that a pass has made with ``graph.call_function``: that of the calls that they replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxpasses.graphs.rewriting import PROVENANCE
from fxpasses.pass_manager.runs import Snapshot

_PLACE = ("stack_trace", "nn_module_stack", "fxpasses")
"""The metadata that say where a node comes from; the rest of its provenance says how it is to be treated."""


def inherit_provenance(before: Snapshot, after: Snapshot) -> None:
    """Give new calls without provenance that of the call that they replace.

    A new call replaces the one that its user had as an argument before. New calls behind it have the same
    provenance; others have that of their arguments, or else of their users.
    """
    new = [entry.node for entry in after.entries if entry.node not in before.by_node and _lacks(entry.node)]
    if not new:
        return
    wanting = set(new)
    for entry in after.entries:
        old = before.by_node.get(entry.node)
        if old is None:
            continue
        was, now = _nodes(old.args, old.kwargs), _nodes(entry.args, entry.kwargs)
        for replaced, node in zip(was, now, strict=False) if len(was) == len(now) else ():
            if node in wanting and node is not replaced:
                _take(node, replaced, PROVENANCE if replaced not in after.by_node else _PLACE)
    for node in reversed(new):
        _take_first(node, [user for user in node.users if user in wanting], PROVENANCE)
    for node in new:
        _take_first(node, node.all_input_nodes, _PLACE)
    for node in reversed(new):
        _take_first(node, node.users, _PLACE)


def _lacks(node: fx.Node) -> bool:
    return node.op == "call_function" and not any(key in node.meta for key in _PLACE)


def _take_first(node: fx.Node, others: Iterable[fx.Node], keys: tuple[str, ...]) -> None:
    for other in others:
        if _lacks(node) and other.op == "call_function":
            _take(node, other, keys)


def _take(node: fx.Node, other: fx.Node, keys: tuple[str, ...]) -> None:
    if _lacks(node):
        node.meta.update({key: other.meta[key] for key in keys if key in other.meta})


def _nodes(*arguments: Any) -> list[fx.Node]:
    """The nodes among arguments, in their order, repeated ones too."""
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return found
