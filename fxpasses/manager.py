"""Running passes over a graph: in order, timed, recorded, and with the graph checked after each change."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpasses.contract import GraphKind, Pass
from fxpasses.errors import PassError
from fxpasses.provenance import failing_node, locate
from fxpasses.rewriting import value_of
from fxpasses.sites import MatchSite, collect_sites

__all__ = ["Check", "PassManager", "PassRun"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassRun:
    """What one pass did to one graph.

    Attributes:
        name: the pass.
        graph: the kind of graph.
        changed: whether it changed anything.
        seconds: how long it took, its checks included.
        nodes_before: number of nodes when it started.
        nodes_after: number of nodes when it was done.
        added: names of the nodes that are new.
        removed: names of the nodes that are gone.
        sites: the places that the pass said it rewrites (see :mod:`fxpasses.sites`).
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

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.name} on {self.graph}: nothing to do ({self.seconds * 1e3:.1f} ms)"
        return (
            f"{self.name} on {self.graph}: {self.nodes_before} -> {self.nodes_after} nodes "
            f"(+{len(self.added)} -{len(self.removed)}, {self.seconds * 1e3:.1f} ms)"
        )


class Check:
    """Looks at a graph before and after each pass, and raises when the pass was wrong. Base class of checks."""

    def before(self, item: Pass, gm: fx.GraphModule, kind: GraphKind) -> Any:
        """Called before the pass runs; what it returns is handed to :meth:`after`. Copy the graph to keep it."""

    def after(
        self, item: Pass, gm: fx.GraphModule, kind: GraphKind, remembered: Any, sites: tuple[MatchSite, ...]
    ) -> None:
        """Called when the pass has changed the graph, which is well formed.

        Raises:
            PassError: the pass is wrong.
        """


class PassManager:
    """A list of passes, run in the order given on each graph that they take.

    >>> from torch import fx
    >>> from fxpasses import PassManager
    >>> from fxpasses.passes import DeadCodeElimination
    >>> def f(x):
    ...     unused = x.cos()
    ...     return x.sin()
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(f)(torch.ones(3))
    >>> [run.changed for run in PassManager([DeadCodeElimination()]).run(gm, "inference")]
    [True]
    """

    def __init__(self, passes: Iterable[Pass], checks: Iterable[Check] = ()) -> None:
        """Raises TypeError when an item is not a :class:`Pass`."""
        self.passes = tuple(passes)
        self.checks = tuple(checks)
        for item in self.passes:
            if not isinstance(item, Pass):
                raise TypeError(
                    f"PassManager: expected Pass objects, got {item!r}; wrap a function with fxpasses.graph_pass"
                )

    def run(self, gm: fx.GraphModule, kind: GraphKind) -> list[PassRun]:
        """Run every pass that takes graphs of this kind on ``gm``, in place.

        Raises:
            PassError: when a pass raises or leaves a graph that is not well formed, names the pass and
                the node. ``gm`` is then in an undefined state.
        """
        runs = [self._run_one(item, gm, kind) for item in self.passes if kind in item.graphs]
        if any(run.changed for run in runs):
            gm.recompile()
        return runs

    def identity(self) -> tuple[str, ...] | None:
        """Hash of everything that decides the result, or ``None`` when one of the passes has none."""
        identities = [item.identity() for item in self.passes]
        return None if None in identities else tuple(identities)  # type: ignore[arg-type]

    def _run_one(self, item: Pass, gm: fx.GraphModule, kind: GraphKind) -> PassRun:
        start = time.perf_counter()
        before = [node.name for node in gm.graph.nodes]
        outputs = _output_values(gm.graph)
        remembered = [check.before(item, gm, kind) for check in self.checks]
        try:
            with collect_sites() as sites:
                changed = item.apply(gm)
        except PassError:
            raise
        except Exception as error:
            raise PassError(
                f"{type(error).__name__}: {error}", failing_node(error, gm), pass_name=item.name, graph=kind
            ) from error
        after = [node.name for node in gm.graph.nodes]
        if not isinstance(changed, bool):
            raise PassError(
                f"apply returned {changed!r}; it must return whether it changed anything, True or False",
                pass_name=item.name,
                graph=kind,
            )
        if changed:
            self._check(item, gm, kind, outputs)
            for check, memory in zip(self.checks, remembered, strict=True):
                check.after(item, gm, kind, memory, tuple(sites.claimed))
        elif before != after:
            raise PassError("apply returned False but changed the graph", pass_name=item.name, graph=kind)
        run = PassRun(
            name=item.name,
            graph=kind,
            changed=changed,
            seconds=time.perf_counter() - start,
            nodes_before=len(before),
            nodes_after=len(after),
            added=_missing(after, before),
            removed=_missing(before, after),
            sites=tuple(sites.claimed),
        )
        log.debug("%s", run)
        return run

    def _check(self, item: Pass, gm: fx.GraphModule, kind: GraphKind, outputs: list[object]) -> None:
        try:
            gm.graph.lint()
        except Exception as error:
            raise PassError(
                f"the graph is not well formed afterwards: {error}", pass_name=item.name, graph=kind
            ) from error
        for node in gm.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta and node.users:
                raise PassError(
                    "a new node has no fake value; make nodes with fxpasses.insert_call",
                    locate(node),
                    pass_name=item.name,
                    graph=kind,
                )
        after = _output_values(gm.graph)
        if len(after) != len(outputs):
            raise PassError(
                f"the graph returned {len(outputs)} values before and returns {len(after)} now",
                pass_name=item.name,
                graph=kind,
            )
        for position, (a, b) in enumerate(zip(outputs, after, strict=True)):
            if (was := _describe(a)) != (now := _describe(b)):
                raise PassError(f"output {position} was {was} and is {now}", pass_name=item.name, graph=kind)


def _missing(names: list[str], others: list[str]) -> tuple[str, ...]:
    """Those of ``names`` that are not among ``others``, in order."""
    known = set(others)
    return tuple(name for name in names if name not in known)


def _output_values(graph: fx.Graph) -> list[object]:
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    return [value_of(v) if isinstance(v, fx.Node) else v for v in returned]


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)} on {value.device}"
    return type(value).__name__
