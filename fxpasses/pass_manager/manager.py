"""Run passes over a graph, in the order of their contracts. Each run is timed, recorded and checked."""

from __future__ import annotations

import inspect
import logging
import os
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

import fake
from fake.error_text import describe_error, safe_repr
from fake.seam.fx import new_nodes
from fake.wrong_arguments import are_words, check_flags, check_type
from fxpasses.errors import ContractError, PassError
from fxpasses.graphs.provenance import failing_node
from fxpasses.graphs.rewriting import PROVENANCE, checksum, constants_of, subgraphs
from fxpasses.pass_manager.groups import Fixpoint, FixpointWarning
from fxpasses.pass_manager.node_metadata import Difference, refresh
from fxpasses.pass_manager.ordering import in_order
from fxpasses.pass_manager.pass_base import Check, FunctionPass, GraphKind, Pass
from fxpasses.pass_manager.runs import PassRun, PassRuns, Snapshot
from fxpasses.pass_manager.sites import Sites, collect_sites
from fxpasses.pass_manager.structure import Facts, check_structure

_LOCATION_KEYS = ("stack_trace", "nn_module_stack", "fxpasses")
"""Metadata that says where a node comes from. The rest of its provenance says how to treat it."""


def inherit_provenance(before: Snapshot, after: Snapshot) -> None:
    """Give each new call without provenance that of the call that it replaces.

    A new call replaces the call that its user had as an argument before. New calls that feed it get the same
    provenance. Others get that of their arguments, or else of their users.
    """
    new = [
        entry.node
        for entry in after.entries
        if entry.node not in before.by_node and _lacks_provenance(entry.node)
    ]
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
                _copy_metadata(
                    node, replaced, PROVENANCE if replaced not in after.by_node else _LOCATION_KEYS
                )
    for node in reversed(new):
        _copy_from_first(node, [user for user in node.users if user in wanting], PROVENANCE)
    for node in new:
        _copy_from_first(node, node.all_input_nodes, _LOCATION_KEYS)
    for node in reversed(new):
        _copy_from_first(node, node.users, _LOCATION_KEYS)


def _lacks_provenance(node: fx.Node) -> bool:
    return node.op == "call_function" and not any(key in node.meta for key in _LOCATION_KEYS)


def _copy_from_first(node: fx.Node, others: Iterable[fx.Node], keys: tuple[str, ...]) -> None:
    for other in others:
        if _lacks_provenance(node) and other.op == "call_function":
            _copy_metadata(node, other, keys)


def _copy_metadata(node: fx.Node, other: fx.Node, keys: tuple[str, ...]) -> None:
    if _lacks_provenance(node):
        node.meta.update({key: other.meta[key] for key in keys if key in other.meta})


def _nodes(*arguments: Any) -> list[fx.Node]:
    """The nodes among arguments, in order, including repeated ones."""
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return found


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.join(_PACKAGE, "passes") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_OTHERS = tuple(os.path.dirname(package.__file__ or "") + os.sep for package in (torch, fake))
_MAX_FRAMES = 6


def pass_frames(item: Pass, error: BaseException) -> list[str]:
    """The frames of the pass and its callees as ``file:line in function: code``, innermost last.

    Frames of torch and of the code that runs passes are omitted, as are middle frames if there are more than
    a few. If the exception passed through no such frame (an ``apply`` with other arguments), returns the line
    of the pass's definition.
    """
    found = [
        f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_pass_file(frame.filename)
    ]
    if len(found) > _MAX_FRAMES:
        left_out = len(found) - _MAX_FRAMES + 1
        found = [found[0], f"... {left_out} more", *found[left_out + 1 :]]
    return found or _definition(item)


def _is_pass_file(file: str) -> bool:
    if file.startswith(_LIBRARY):
        return True
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (standard or file.startswith((_PACKAGE, *_OTHERS, "<frozen")))


def _definition(item: Pass) -> list[str]:
    what = inspect.unwrap(item.function) if isinstance(item, FunctionPass) else type(item).apply
    code = getattr(what, "__code__", None)
    return [f"{code.co_filename}:{code.co_firstlineno}, where it is defined"] if code is not None else []


log = logging.getLogger(__name__)


class PassManager:
    """Orders passes as their contracts allow, and runs them on each graph that they take.

    After each pass that changed something, fake values downstream of the change are updated, and the graph's
    structure is compared with the one before (:mod:`fxpasses.pass_manager.structure`).

    Attributes:
        passes: the passes as given.
        checks: further checks, called around each pass.

    >>> import torch
    >>> from fxpasses import PassManager
    >>> from fxpasses.passes import EliminateDeadCode
    >>> def f(x):
    ...     unused = x.cos()
    ...     return x.sin()
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(f)(torch.ones(3))
    >>> [run.removed for run in PassManager([EliminateDeadCode()]).run(gm, "inference")]
    [('cos',)]
    """

    def __init__(
        self,
        passes: Iterable[Pass],
        checks: Iterable[Check] = (),
        *,
        structure: bool = True,
        holds: Sequence[str] = (),
    ) -> None:
        """Order the passes.

        Args:
            passes: the passes. Passes that may run in any order keep the given order.
            checks: checks to call around each pass, after the structure check.
            structure: whether to check the structure of the graph after each pass.
            holds: properties that passes may require and that hold from the start.

        Raises:
            TypeError: if an item is not a :class:`Pass`.
            ContractError: if a pass has no name, two passes conflict, require each other or have the same
                name, or a pass requires what nothing provides.
        """
        if isinstance(passes, str) or not isinstance(passes, Iterable):
            raise TypeError(f"PassManager: expected a list of Pass objects, got {passes!r}")
        check_type("PassManager", "checks", checks, Iterable, "a list of fxpasses.Check objects")
        check_flags("PassManager", structure=structure)
        self.passes = tuple(passes)
        self.checks = tuple(checks)
        for check in self.checks:
            check_type("PassManager", "checks", check, Check, "fxpasses.Check objects")
        check_type(
            "PassManager", "holds", holds, lambda v: are_words(v, Sequence | Set), "a list of properties"
        )
        self._structure = structure
        for item in self.passes:
            if not isinstance(item, Pass):
                raise TypeError(
                    f"PassManager: expected Pass objects, got {item!r}; wrap a function with fxpasses.graph_pass"
                )
            if not isinstance(getattr(item, "name", None), str):
                raise ContractError(
                    f"{type(item).__qualname__} has no name: give the class one, name = 'what_it_does'"
                )
        self._order = in_order(self.passes, holds)

    def order(self, kind: GraphKind) -> list[Pass]:
        """The passes for one kind of graph, in run order.

        Raises:
            ContractError: if there is no such kind of graph.
        """
        if kind not in self._order:
            raise ContractError(f"unknown kind of graph {kind!r}; choose from {', '.join(self._order)}")
        return list(self._order[kind])

    def run(self, gm: fx.GraphModule, kind: GraphKind) -> PassRuns:
        """Run every pass for graphs of this kind on ``gm``, in place. Returns a record of each run.

        Raises:
            ContractError: if there is no such kind of graph. Nothing has run then.
            TypeError: if ``gm`` is not a GraphModule.
            PassError: if a pass raises or leaves an invalid graph (:class:`~fxpasses.StructureError`). Names
                the pass, the match site, the node and the user's line. ``gm`` is then in an undefined state.
        """
        passes = self.order(kind)
        if not isinstance(gm, fx.GraphModule):
            raise TypeError(f"PassManager.run: expected a torch.fx.GraphModule, got {gm!r}")
        graph = _Graph(gm, kind, self.checks, self._structure)
        runs = PassRuns()
        for item in passes:
            if isinstance(item, Fixpoint):
                runs += _run_group(item, graph)
            else:
                runs.append(graph.run(item))
        if any(run.changed for run in runs):
            gm.recompile()
        return runs

    def identity(self) -> tuple[str, ...] | None:
        """Hashes of everything that determines the result, or ``None`` if one of the passes has none."""
        identities = [item.identity() for item in self.passes]
        return None if None in identities else tuple(identities)  # type: ignore[arg-type]


def _run_group(group: Fixpoint, graph: _Graph) -> list[PassRun]:
    members = [item for item in group.passes if graph.kind in item.contract.graphs]
    runs: list[PassRun] = []
    for number in range(1, group.limit + 1):
        latest = [graph.run(item, round=number) for item in members]
        runs += latest
        if not any(run.changed for run in latest):
            return runs
    still_changing = ", ".join(repr(run.name) for run in latest if run.changed)
    warnings.warn(
        f"fixpoint group {group.name!r} stopped after its limit of {group.limit} rounds; {still_changing} still changed the "
        f"{graph.kind} graph: raise the limit, or look for passes that undo each other",
        FixpointWarning,
        stacklevel=3,
    )
    return runs


@dataclass
class _Change:
    """A pass's changes to a graph and its subgraphs: the names of new, removed and modified nodes.

    A node that holds a constant is modified if the constant is written to or replaced.
    """

    after: Snapshot
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()
    reordered: bool = False
    inner: dict[str, _Change] = field(default_factory=dict)

    @property
    def has_changes(self) -> bool:
        """Whether anything changed."""
        return bool(self.added or self.removed or self.modified or self.reordered) or any(
            change.has_changes for change in self.inner.values()
        )

    def add(self, name: str, change: _Change) -> None:
        """Include the changes in a subgraph."""
        self.inner[name] = change
        for part in ("added", "removed", "modified"):
            names = tuple(f"{name}.{node}" for node in getattr(change, part))
            setattr(self, part, getattr(self, part) + names)


def _constant_versions(gm: fx.GraphModule) -> dict[str, tuple[torch.Tensor, int, int]]:
    """The tensors that the graph holds, each with its version counter and a checksum of its data.

    Inference tensors do not count writes, and nothing counts writes through ``.data`` or ``numpy()``.
    """
    return {
        name: (t, -1 if t.is_inference() else t._version, checksum(t)) for name, t in constants_of(gm).items()
    }


class _Graph:
    """A graph while passes run on it, with the facts known between two passes."""

    def __init__(
        self, gm: fx.GraphModule, kind: GraphKind, checks: tuple[Check, ...], structure: bool
    ) -> None:
        self.gm, self.kind, self.checks, self.structure = gm, kind, checks, structure
        self._snapshot = Snapshot(gm.graph)
        self._facts: Facts | None = None
        self._constants = _constant_versions(gm)
        self._inner = {name: _Graph(graph, kind, (), structure) for name, graph in subgraphs(gm).items()}
        """The graphs that are passed to operators such as ``torch.cond``."""

    def run(self, item: Pass, round: int = 0) -> PassRun:
        """Run one pass, update the metadata, and check the result."""
        before = self._snapshot
        checking = time.perf_counter()
        self._prepare()
        remembered = [check.before(item, self.gm, self.kind) for check in self.checks]
        start = time.perf_counter()
        changed, sites = self._apply(item)
        applied = time.perf_counter()
        change = self._change()
        if change.has_changes and not changed:
            raise PassError(
                "apply returned False but changed the graph", pass_name=item.name, graph=self.kind
            )
        after = change.after
        if changed:
            self._update_and_check(item, change, sites)
            for check, memory in zip(self.checks, remembered, strict=True):
                check.after(item, self.gm, self.kind, memory, tuple(sites.claimed))
            after = self._snapshot
        run = PassRun(
            name=item.name,
            graph=self.kind,
            changed=change.has_changes,
            seconds=applied - start,
            nodes_before=len(before.entries),
            nodes_after=len(after.entries),
            added=change.added,
            removed=change.removed,
            modified=change.modified,
            sites=tuple(sites.claimed),
            check_seconds=time.perf_counter() - applied + start - checking,
            round=round,
            options=str(item),
            contract=item.contract,
            _before=before,
            _after=after,
        )
        log.debug("%s", run)
        return run

    def _prepare(self) -> None:
        """Compute the facts that the structure check compares with."""
        if self.structure and self._facts is None:
            self._facts = Facts(self.gm.graph, self._snapshot)
        for graph in self._inner.values():
            graph._prepare()

    def _change(self) -> _Change:
        """The changes since the last snapshot, including those of the subgraphs."""
        before, after = self._snapshot, Snapshot(self.gm.graph)
        known, self._constants = self._constants, _constant_versions(self.gm)
        if before.is_untouched(after):
            change = _Change(after)
        else:
            differing = before.changed(after)
            change = _Change(
                after,
                tuple(entry.name for entry in differing if entry.node not in before.by_node),
                tuple(entry.name for entry in before.entries if entry.node not in after.by_node),
                tuple(entry.name for entry in differing if entry.node in before.by_node),
                [e.node for e in before.entries] != [e.node for e in after.entries],
            )
        change.modified += tuple(
            name for name, (value, *state) in self._constants.items()
            if name in known and (known[name][0] is not value or [*known[name][1:]] != state)
        )  # fmt: skip
        for name, graph in self._inner.items():
            if subgraphs(self.gm).get(name) is graph.gm:
                change.add(name, graph._change())
        return change

    def _update_and_check(self, item: Pass, change: _Change, sites: Sites) -> None:
        """Update the metadata, check the structure, and remember the graph's current state."""
        for name, inner in change.inner.items():
            if inner.has_changes:
                self._inner[name]._update_and_check(item, inner, sites)
        inherit_provenance(self._snapshot, change.after)
        differences = self._refresh(item, self._snapshot, change.after)
        if self._facts is not None:
            self._facts = check_structure(
                item, self.gm, self.kind, self._facts, differences, tuple(sites.claimed), sites.made_at
            )
        self._snapshot = self._facts.snapshot if self._facts is not None else Snapshot(self.gm.graph)
        self._inner = {
            name: self._inner[name] if name in change.inner else _Graph(graph, self.kind, (), self.structure)
            for name, graph in subgraphs(self.gm).items()
        }

    def _apply(self, item: Pass) -> tuple[bool, Sites]:
        try:
            with collect_sites() as sites, new_nodes(self.gm, sites.made):
                changed = item.apply(self.gm)
        except PassError:
            raise
        except Exception as error:
            failure = PassError(
                describe_error(error), failing_node(error, self.gm), pass_name=item.name, graph=self.kind
            )
            failure.add_lines(pass_frames(item, error))
            raise failure from error
        if not isinstance(changed, bool):
            raise PassError(
                f"apply returned {safe_repr(changed)}; it must return whether it changed anything, True or False",
                pass_name=item.name,
                graph=self.kind,
            )
        return changed, sites

    def _refresh(self, item: Pass, before: Snapshot, after: Snapshot) -> list[Difference]:
        """Recompute fake values where calls, or values set by the pass, are new."""
        try:
            return refresh(self.gm, before.touched(after), before)
        except Exception as error:
            raise PassError(
                f"the graph cannot be run any more: {describe_error(error)}",
                failing_node(error, self.gm),
                pass_name=item.name,
                graph=self.kind,
            ) from error
