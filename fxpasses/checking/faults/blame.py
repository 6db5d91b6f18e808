"""Trace a difference between two graphs to the match site and the node that cause it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from fxpasses.checking.comparison.rounding import LIMIT, distance
from fxpasses.checking.comparison.same_function import Relation
from fxpasses.checking.comparison.values import Mismatch, Reference, compare, value_names
from fxpasses.checking.comparison.windows import changed_nodes
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import ExactRun, Run
from fxpasses.errors import Location
from fxpasses.graphs.provenance import locate
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import Contract, FunctionPass, GraphKind, Pass
from fxpasses.pass_manager.sites import MatchSite, collect_sites

T = TypeVar("T")
S = TypeVar("S")
_SEED = 20
_SECONDS = 1.5
"""CPU time of the search for wrong match sites: the user waits. Questions that find one are always asked."""


def apply_pass(
    item: Pass, gm: fx.GraphModule, allowed: Callable[[int], bool] = lambda index: True
) -> tuple[fx.GraphModule, tuple[MatchSite, ...]]:
    """Run a pass on a copy of a graph.

    Args:
        item: the pass.
        gm: the graph; not mutated.
        allowed: whether the pass may rewrite the match site with an index.

    Returns:
        The rewritten copy, and the sites that the pass claimed.

    Raises:
        Exception: whatever the pass raises.
    """
    copy = copy_graph(gm, constants=True)
    with collect_sites(allowed) as sites:
        item.apply(copy)
    copy.recompile()
    return copy, tuple(sites.claimed)


def minimize_subset(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Find a subset of ``items`` that still fails, from which no single item can be removed.

    Delta debugging (A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input", 2002),
    by removal alone: pieces of half the size each time, from the end, then single items until none can go. If
    all items are needed, that asks twice for each.

    >>> minimize_subset(range(40), lambda chosen: 17 in chosen and 23 in chosen)
    [17, 23]
    """
    kept = list(items)
    size = len(kept)
    while len(kept) > 1:
        size = max(1, min(size, len(kept)) // 2)
        before, end = len(kept), len(kept)
        while end > 0:
            start = max(0, end - size)
            rest = kept[:start] + kept[end:]
            if rest and fails(rest):
                kept = rest
            end = start
        if size == 1 and len(kept) == before:
            break
    return kept


class TimeLimited(Generic[S]):
    """A question that is answered with no once its CPU time is up, so that a search ends with what it found.

    Args:
        seconds: from now on.
        fails: the question.
        min_calls: how often to ask it however long that takes, so that what so many steps find does not depend
            on the machine.

    >>> len(minimize_subset(range(40), TimeLimited(0.0, lambda chosen: 17 in chosen)))
    40
    >>> minimize_subset(range(40), TimeLimited(0.0, lambda chosen: 17 in chosen, min_calls=14))
    [17]
    """

    def __init__(self, seconds: float, fails: Callable[[S], bool], min_calls: int = 0) -> None:
        self._deadline, self._remaining = time.thread_time() + seconds, itertools.count(min_calls, -1)
        self._fails = fails
        self.timed_out = False
        """Whether it was no longer asked."""

    def __call__(self, candidate: S) -> bool:
        self.timed_out = next(self._remaining) <= 0 and time.thread_time() >= self._deadline
        return not self.timed_out and self._fails(candidate)


def guilty_sites(
    item: Pass,
    before: fx.GraphModule,
    kind: GraphKind,
    sites: Sequence[MatchSite],
    inputs: Sequence[Any],
    bitwise: bool,
    suspects: Collection[str] = (),
    known: Mapping[Hashable, Relation] | None = None,
) -> tuple[tuple[MatchSite, ...], bool]:
    """Find the match sites at which the rewrite alone is wrong, or else the fewest that together are.

    Args:
        item: the pass.
        before: the graph before it.
        kind: the kind of graph.
        sites: the match sites that it claimed.
        inputs: inputs on which the rewritten graph is wrong.
        bitwise: whether results must match bit for bit.
        suspects: names of suspected calls, whose sites are tried first.
        known: what is known of windows of the graph on these inputs.

    Returns:
        The sites, none if no subset of them is wrong; and whether the search ended before it asked about all
        others.
    """
    if not sites:
        return (), False
    reference, names = Reference(before, inputs), value_names(before, kind)
    reference.windows.update(known or {})

    def is_wrong(chosen: list[int]) -> bool:
        try:
            candidate, _ = apply_pass(item, before, set(chosen).__contains__)
        except Exception:  # noqa: BLE001  (a pass that cannot leave these sites out tells nothing about the others)
            return False
        return bool(compare(reference, candidate, names, bitwise))

    applied = [site for site in sites if site.applied]
    near = [site.index for site in applied if site.location.node in suspects]
    # One question for the suspects, two per halving, one for all others.
    fails = TimeLimited(_SECONDS, is_wrong, min_calls=2 * len(applied).bit_length() + 2)
    start = near if 0 < len(near) < len(applied) and fails(near) else [site.index for site in applied]
    guilty = set(minimize_subset(start, fails))
    others = [site.index for site in applied if site.index not in guilty]
    if len(guilty) == 1:
        guilty.update(_wrong_alone(others, fails))
    return tuple(site for site in sites if site.index in guilty), fails.timed_out


def _wrong_alone(indices: list[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """Find those that are wrong without the others, by halving: most groups of sites have none."""
    if not indices or not fails(indices):
        return []
    if len(indices) == 1:
        return indices
    middle = len(indices) // 2
    return [*_wrong_alone(indices[:middle], fails), *_wrong_alone(indices[middle:], fails)]


def partners(
    item: Pass,
    earlier: Sequence[Pass],
    start: fx.GraphModule,
    input_graph: fx.GraphModule,
    kind: GraphKind,
    inputs: Sequence[Any],
    bitwise: bool,
) -> tuple[Pass, ...]:
    """Return the fewest earlier passes after which ``item`` is wrong; empty if it is wrong by itself.

    A pass is wrong by itself if the calls of the graph that it got suffice to show the fault: it must be
    right on every graph, whoever wrote the calls that it matches. Others contribute if it is wrong only with
    what else they left (marks in ``node.meta``), and they are needed to show it.

    Args:
        item: the wrong pass.
        earlier: the passes that changed the graph before it did, in order.
        start: the graph before all of them.
        input_graph: the graph that ``item`` got.
        kind: the kind of graph.
        inputs: inputs on which it is wrong.
        bitwise: whether it promises the same bits.
    """
    names = value_names(start, kind)

    def is_wrong(others: Sequence[Pass], gm: fx.GraphModule) -> bool:
        try:
            before = after_passes(others, gm, kind)
            after = after_passes([item], before, kind)
            return bool(compare(Reference(before, inputs), after, names, bitwise))
        except Exception:  # noqa: BLE001  (a pass that does not run without the others is not wrong without them)
            return False

    def fails(chosen: list[int]) -> bool:
        return is_wrong([earlier[i] for i in chosen], start)

    chosen = list(range(len(earlier)))
    if (
        not chosen
        or is_wrong([], _with_captured_metadata(input_graph, start))
        or not fails(chosen)
        or fails([])
    ):
        return ()
    return tuple(earlier[i] for i in minimize_subset(chosen, fails))


def _with_captured_metadata(gm: fx.GraphModule, captured: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with only the kinds of metadata that it was captured with."""
    copy = copy_graph(gm, constants=True)
    known = {key for node in captured.graph.nodes for key in node.meta}
    for node in copy.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key in known}
    copy.meta = {key: value for key, value in copy.meta.items() if key in captured.meta}
    return copy


def after_passes(items: Sequence[Pass], gm: fx.GraphModule, kind: GraphKind) -> fx.GraphModule:
    """Run passes in sequence on a copy of a graph, whatever their contracts require.

    Args:
        items: the passes, in order.
        gm: the graph; not mutated.
        kind: the kind of graph.

    Returns:
        The rewritten copy.
    """
    copy = copy_graph(gm, constants=True)
    for item in items:
        alone = FunctionPass(function=item.apply, name=item.name, contract=Contract(item.graphs))
        PassManager([alone], structure=False).run(copy, kind)
    return copy


def locate_suspect(
    before: fx.GraphModule, after: fx.GraphModule, suspects: Collection[str]
) -> Location | None:
    """Locate the first suspect that a pass added, or else the first that was in the graph before.

    Args:
        before: the graph before.
        after: the graph after.
        suspects: names of the calls that make a result wrong.

    Returns:
        Its node and line of the user's program; ``None`` if no suspect is in either graph.
    """
    known = {n.name for n in before.graph.nodes}
    new = [n for n in after.graph.nodes if n.name in suspects and n.name not in known]
    old = [n for n in before.graph.nodes if n.name in suspects]
    return locate((new or old)[0]) if new or old else None


def first_difference(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]) -> Location:
    """Locate the first node of the graph before whose value changed more than rounding explains.

    Nodes are matched by name. If no common node differs, the first changed one is returned.

    Args:
        before: the graph before.
        after: the graph after.
        inputs: the inputs to run both on.
    """
    kept, exact = [Run(gm, keep=True) for gm in (before, after)], ExactRun(before, keep=True)
    for run in (*kept, exact):
        try:
            run(cloned(inputs), _SEED)
        except Exception:  # noqa: BLE001  (what was computed before it raised is compared)
            continue
    old, new = changed_nodes(before, after)
    for node in before.graph.nodes:
        name = node.name
        if node.op != "call_function" or name not in kept[0].values or name not in kept[1].values:
            continue
        mine, theirs = kept[0].values[name], kept[1].values[name]
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            continue
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return locate(node)
        how = distance(mine, theirs, [exact.values[name]] if name in exact.values else [])
        if how is not None and how.times > LIMIT:
            return locate(node)
    changed = [n for n in before.graph.nodes if n.name in old and n.op == "call_function"]
    changed += [n for n in after.graph.nodes if n.name in new and n.op == "call_function"]
    return locate(changed[0]) if changed else Location()


def describe_mismatches(mismatches: Sequence[Mismatch]) -> str:
    """Describe the first mismatch and count the others, in one line."""
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    return f"{mismatches[0]}{more}"
