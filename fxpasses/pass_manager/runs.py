"""The record of a pass: snapshots of the graph before and after it, compared.

A snapshot holds the nodes' arguments at one point in time. Taking one costs a walk over the graph. Texts and
differences are computed on demand.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fake.notebook import as_html
from fxpasses.graphs.rewriting import same_size
from fxpasses.pass_manager.pass_base import Contract, GraphKind
from fxpasses.pass_manager.sites import MatchSite


class Entry(NamedTuple):
    """One node at the time of the snapshot."""

    node: fx.Node
    name: str
    target: Any
    args: Any
    kwargs: Any
    value: Any


class Snapshot:
    """The current nodes of a graph, unaffected by later changes to the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.entries = [Entry(n, n.name, n.target, n.args, n.kwargs, n.meta.get("val")) for n in graph.nodes]

    @functools.cached_property
    def by_node(self) -> dict[fx.Node, Entry]:
        """The entry of each node."""
        return {entry.node: entry for entry in self.entries}

    @property
    def output(self) -> Any:
        """The outputs of the graph."""
        return self.entries[-1].args[0]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of all nodes."""
        return frozenset(entry.name for entry in self.entries)

    def is_untouched(self, later: Snapshot) -> bool:
        """Whether even the objects that hold each node's arguments are the same as here."""
        return len(self.entries) == len(later.entries) and all(
            a.node is b.node and a.args is b.args and a.kwargs is b.kwargs and a.target is b.target
            for a, b in zip(self.entries, later.entries, strict=True)
        )

    def changed(self, later: Snapshot) -> list[Entry]:
        """The entries of ``later`` that are new, or whose target or arguments differ from here."""
        known = self.by_node
        found = []
        for entry in later.entries:
            old = known.get(entry.node)
            if old is None or not _same_call(old, entry):
                found.append(entry)
        return found

    def touched(self, later: Snapshot) -> set[fx.Node]:
        """The nodes of ``later`` whose value may not match their call: call changed, or value was set."""
        known = self.by_node
        found = {entry.node for entry in self.changed(later)}
        return found | {
            e.node for e in later.entries if e.node in known and known[e.node].value is not e.value
        }

    def text(self) -> str:
        """The graph as text, one node per line: ``name: f32[2, 3] = operator(arguments)``."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = {entry.node: entry.name for entry in self.entries}
        for entry in self.entries:
            node = entry.node
            arguments = [_text(a, names) for a in entry.args]
            arguments += [f"{key}={_text(value, names)}" for key, value in entry.kwargs.items()]
            if node.op == "output":
                yield f"return {', '.join(arguments)}"
                continue
            described = f": {described}" if (described := _describe(entry.value)) else ""
            target = entry.target if node.op in ("call_function", "get_attr") else node.op
            call = f"{target}({', '.join(arguments)})" if node.op == "call_function" else str(target)
            yield f"{entry.name}{described} = {call}"


@dataclass(frozen=True)
class PassRun:
    """The record of one pass on one graph.

    Attributes:
        name: the name of the pass.
        graph: the kind of graph.
        changed: whether it changed anything.
        seconds: how long the pass took.
        check_seconds: how long it took to update metadata and check the result.
        nodes_before: number of nodes before the pass.
        nodes_after: number of nodes after the pass.
        added: names of new nodes.
        removed: names of removed nodes.
        modified: names of remaining nodes whose target or arguments changed.
        sites: the match sites that the pass claimed (see :mod:`fxpasses.pass_manager.sites`).
        round: the round of its fixpoint group, from 1; 0 outside of a group.
        options: the pass with its options, as text.
        contract: the contract of the pass.
    """

    name: str
    graph: GraphKind
    changed: bool
    seconds: float
    nodes_before: int
    nodes_after: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    sites: tuple[MatchSite, ...] = ()
    modified: tuple[str, ...] = ()
    check_seconds: float = 0.0
    round: int = 0
    options: str = ""
    contract: Contract = field(default_factory=Contract, compare=False)
    _before: Snapshot | None = field(default=None, repr=False, compare=False)
    _after: Snapshot | None = field(default=None, repr=False, compare=False)

    @property
    def matches(self) -> int:
        """Number of match sites that were rewritten."""
        return sum(site.applied for site in self.sites)

    @functools.cached_property
    def before(self) -> str:
        """The graph before the pass as text."""
        return self._before.text() if self._before is not None else ""

    @functools.cached_property
    def after(self) -> str:
        """The graph after the pass as text."""
        return self._after.text() if self._after is not None else ""

    @property
    def diff(self) -> str:
        """The difference as a unified diff with three lines of context; "" if there is none."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm=""
        )
        return "\n".join(lines)

    def to_dict(self, texts: bool = True) -> dict[str, Any]:
        """The record as plain data, with the texts of the graphs or (faster) without."""
        data: dict[str, Any] = {
            "name": self.name,
            "options": self.options,
            "contract": {
                name: sorted(value) if isinstance(value, frozenset) else value
                for name, value in vars(self.contract).items()
            },
            "graph": self.graph,
            "changed": self.changed,
            "round": self.round,
            "seconds": self.seconds,
            "check_seconds": self.check_seconds,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "added": list(self.added),
            "removed": list(self.removed),
            "modified": list(self.modified),
            "matches": self.matches,
            "sites": [
                {
                    "index": site.index,
                    "applied": site.applied,
                    "node": site.location.node,
                    "target": site.location.target,
                    "source": site.location.source,
                    "module": site.location.module,
                }
                for site in self.sites
            ],
        }
        if texts:
            data |= {"before": self.before, "after": self.after, "diff": self.diff}
        return data

    def _repr_html_(self) -> str:
        rows = [
            (s.index, s.location.target, s.location.node, s.location.source, "yes" if s.applied else "no")
            for s in self.sites
        ]
        return as_html(str(self), ("site", "operator", "node", "line", "rewritten"), rows, code=self.diff)

    def to_json(self, texts: bool = True, indent: int | None = None) -> str:
        """The record as JSON."""
        return json.dumps(self.to_dict(texts), indent=indent)

    def __str__(self) -> str:
        took = f"{self.seconds * 1e3:.1f} ms"
        if self.check_seconds:
            took += f" and {self.check_seconds * 1e3:.1f} ms to check"
        rounds = f", round {self.round}" if self.round else ""
        if not self.changed:
            return f"{self.name} on {self.graph}{rounds}: nothing to do ({took})"
        counts = f"+{len(self.added)} -{len(self.removed)} ~{len(self.modified)}"
        sites = f" at {self.matches} of {len(self.sites)} sites" if self.sites else ""
        return (
            f"{self.name} on {self.graph}{rounds}: {self.nodes_before} -> {self.nodes_after} nodes "
            f"({counts}{sites}, {took})"
        )


class PassRuns(list[PassRun]):
    """The result of :meth:`fxpasses.PassManager.run`: a list that notebooks show as a table with diffs."""

    def _repr_html_(self) -> str:
        rows = [
            (
                r.name,
                r.graph,
                f"{r.nodes_before} to {r.nodes_after}" if r.changed else "nothing to do",
                r.matches,
                f"{r.seconds * 1e3:.1f} ms",
            )
            for r in self
        ]
        changed = [run for run in self if run.changed]
        code = "\n\n".join(f"# {run.name} on {run.graph}\n{run.diff}" for run in changed)
        text = f"{len(changed)} of {len(self)} runs changed the graph"
        return as_html(text, ("pass", "graph", "nodes", "sites", "took"), rows, code)


def _same_call(a: Entry, b: Entry) -> bool:
    if a.target is not b.target and a.target != b.target:
        return False
    return same_argument(a.args, b.args) and same_argument(a.kwargs, b.kwargs)


def same_argument(a: Any, b: Any, same: Callable[[Any, Any], bool] | None = None) -> bool:
    """Compare two call arguments, without a guard on symbolic sizes.

    Args:
        a: an argument: a node, a number, a string, or a list, tuple, slice or dict of these.
        b: the other one.
        same: compares the elements of containers; by default this function. Two nodes are the same only if
            they are one object.
    """
    if same is None:
        if a is b:
            return True
        same = same_argument
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, slice):
        return isinstance(b, slice) and same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return same_size(a, b)
    return type(a) is type(b) and bool(a == b)


def _text(argument: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return names.get(argument, argument.name)
    if isinstance(argument, (list, tuple)):
        inside = ", ".join(_text(a, names) for a in argument)
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    return str(argument) if isinstance(argument, torch.SymInt) else repr(argument)


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


def _describe(value: Any) -> str:
    """``f32[2, 3]`` for a tensor, the expression for a symbolic number, "" for other values."""
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_describe(v) or '-' for v in value)})"
    return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else ""
