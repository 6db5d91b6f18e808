"""From a difference between two graphs to the match site and the node that cause it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import ExactRun, Run
from fxpasses.checking.rounding import LIMIT, distance
from fxpasses.checking.same_function import Relation
from fxpasses.checking.values import Mismatch, Reference, compare, value_names
from fxpasses.checking.windows import changed_nodes
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
"""CPU time of the search for the match sites that are wrong: the user waits for the verdict. What finds one is always asked."""


def apply_pass(
    item: Pass, gm: fx.GraphModule, allowed: Callable[[int], bool] = lambda index: True
) -> tuple[fx.GraphModule, tuple[MatchSite, ...]]:
    """Run a pass on a copy of a graph.

    Args:
        item: the pass.
        gm: the graph; it is not changed.
        allowed: whether the pass may rewrite the match site of an index.

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


def minimise(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A subset of ``items`` that still fails, from which no single item can be left out.

    Delta debugging (A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input", 2002), by leaving out alone:
    pieces of half the size each time, from the end, then single items until none can go. Where all are needed, that asks twice
    for each item.

    >>> minimise(range(40), lambda chosen: 17 in chosen and 23 in chosen)
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


class InTime(Generic[S]):
    """A question whose answer is no once so many seconds of CPU time are over: a search ends with what it has found by then.

    Args:
        seconds: from now on.
        fails: the question.
        at_least: how often it is asked however long that takes, so that what is found in so many steps does not depend on the
            machine.

    >>> len(minimise(range(40), InTime(0.0, lambda chosen: 17 in chosen)))
    40
    >>> minimise(range(40), InTime(0.0, lambda chosen: 17 in chosen, at_least=14))
    [17]
    """

    def __init__(self, seconds: float, fails: Callable[[S], bool], at_least: int = 0) -> None:
        self._until, self._left = time.thread_time() + seconds, itertools.count(at_least, -1)
        self._fails = fails
        self.is_over = False
        """Whether it was not asked any more."""

    def __call__(self, asked: S) -> bool:
        self.is_over = next(self._left) <= 0 and time.thread_time() >= self._until
        return not self.is_over and self._fails(asked)


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
    """Find a pass's match sites at which its rewrite alone makes the graph wrong, or else the fewest that do together.

    Args:
        item: the pass.
        before: the graph before it.
        kind: the kind of graph.
        sites: the match sites that it claimed.
        inputs: inputs on which the rewritten graph is wrong.
        bitwise: whether results have to have the same bits.
        suspects: names of calls that are suspected already: the sites among them are tried first.
        known: what is known of windows of the graph on these inputs.

    Returns:
        The sites, none where no choice of them is wrong; and whether the search ended before it had asked about all others.
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
    # One question for the suspects, two for each halving, one for all others.
    fails = InTime(_SECONDS, is_wrong, at_least=2 * len(applied).bit_length() + 2)
    start = near if 0 < len(near) < len(applied) and fails(near) else [site.index for site in applied]
    guilty = set(minimise(start, fails))
    others = [site.index for site in applied if site.index not in guilty]
    if len(guilty) == 1:
        guilty.update(_wrong_alone(others, fails))
    return tuple(site for site in sites if site.index in guilty), fails.is_over


def _wrong_alone(indices: list[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """Those that are wrong without the others, searched by halves: in most groups of sites none is."""
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
    met: fx.GraphModule,
    kind: GraphKind,
    inputs: Sequence[Any],
    bitwise: bool,
) -> tuple[Pass, ...]:
    """The fewest of the earlier passes after which ``item`` is wrong; empty when it is wrong by itself.

    It is wrong by itself where the calls of the graph that it met are enough to see the fault: a pass has to be right on
    every graph, whoever wrote the calls that it matches. Others have a part in it where it is wrong only with what they
    left beside the calls (marks in ``node.meta``), and where they are needed to see it.

    Args:
        item: the pass that is wrong.
        earlier: the passes that changed the graph before it did, in order.
        start: the graph before all of them.
        met: the graph that ``item`` was given.
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
    if not chosen or is_wrong([], _without_marks(met, start)) or not fails(chosen) or fails([]):
        return ()
    return tuple(earlier[i] for i in minimise(chosen, fails))


def _without_marks(gm: fx.GraphModule, captured: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with only those kinds of metadata that it had when it was captured."""
    copy = copy_graph(gm, constants=True)
    known = {key for node in captured.graph.nodes for key in node.meta}
    for node in copy.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key in known}
    copy.meta = {key: value for key, value in copy.meta.items() if key in captured.meta}
    return copy


def after_passes(items: Sequence[Pass], gm: fx.GraphModule, kind: GraphKind) -> fx.GraphModule:
    """Run passes on a copy of a graph one after the other, whatever their contracts require.

    Args:
        items: the passes, in order.
        gm: the graph; it is not changed.
        kind: the kind of graph.

    Returns:
        The rewritten copy.
    """
    copy = copy_graph(gm, constants=True)
    for item in items:
        alone = FunctionPass(function=item.apply, name=item.name, contract=Contract(item.graphs))
        PassManager([alone], structure=False).run(copy, kind)
    return copy


def call_to_blame(
    before: fx.GraphModule, after: fx.GraphModule, suspects: Collection[str]
) -> Location | None:
    """Locate the first call that a pass made among the suspects, or else the first that it changed there.

    Args:
        before: the graph before.
        after: the graph after.
        suspects: names of the calls that make a result wrong.

    Returns:
        Its node and line of the user's program; ``None`` when no suspect is in either graph.
    """
    known = {n.name for n in before.graph.nodes}
    new = [n for n in after.graph.nodes if n.name in suspects and n.name not in known]
    old = [n for n in before.graph.nodes if n.name in suspects]
    return locate((new or old)[0]) if new or old else None


def first_difference(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]) -> Location:
    """Locate the first node, in the order of the graph before, that has another value afterwards than rounding explains.

    Nodes are matched by name. When none of those that both graphs have differs, the first changed one is named.

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
    """The mismatches in one line: the first, and how many others."""
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    return f"{mismatches[0]}{more}"
