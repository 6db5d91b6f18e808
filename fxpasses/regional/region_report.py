"""Report on regions: a graph's repeated subgraphs, why each became a region or not, and what that saves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import fx

from fake.notebook import as_html
from fake.wrong_arguments import check_type
from fxpasses.compiling.options import check_regions
from fxpasses.regional.compiled_region import CompiledRegion
from fxpasses.regional.cost_model import CostModel
from fxpasses.regional.errors import RegionGraphError
from fxpasses.regional.facts import value_of
from fxpasses.regional.region_search import IsomorphicSubgraphs, Search, search


@dataclass(frozen=True)
class RepeatedSubgraph:
    """One kind of repeated subgraph.

    Attributes:
        name: the modules that it covers (``blocks.*``), or its first and last operator.
        copies: the number of copies.
        calls: the number of graph calls in one copy.
        nodes: the name of the first node of each copy.
        modules: for each copy, the module around it, or "".
        taken: whether it becomes a region.
        reason: why it does not, or "".
        saved_seconds: estimated compile time that a region saves.
        run_seconds: estimated time that calls and lost fusion cost in a thousand steps.
        kept_bytes: upper bound on extra memory saved for the backward pass, because a region does not
            recompute values from outside.
        compile_seconds: time to compile it; ``None`` if it was not compiled.
        key: its content hash; "" if it was not compiled.
    """

    name: str
    copies: int
    calls: int
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    taken: bool
    reason: str
    saved_seconds: float
    run_seconds: float
    kept_bytes: int
    compile_seconds: float | None = None
    key: str = ""

    def __str__(self) -> str:
        copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
        head = f"{self.name}: {copies} of {self.calls} calls"
        if not self.taken:
            return f"{head}: left, {self.reason}"
        took = "" if self.compile_seconds is None else f" compiled in {self.compile_seconds:.2f} s,"
        return f"{head}: one region,{took} {_saved(self.saved_seconds)}, {self.costs}"

    @property
    def costs(self) -> str:
        """Return what it costs in time and memory, in words."""
        time = (
            f"costs about {1e3 * self.run_seconds:.0f} us a step"
            if self.run_seconds
            else "costs nothing to run"
        )
        return time + (
            f" and up to {self.kept_bytes:,} bytes more for the backward pass" if self.kept_bytes else ""
        )


@dataclass(frozen=True)
class RegionReport:
    """The repeated subgraphs of one graph.

    ``str()`` gives a summary, then one line per subgraph: what became of it, and what that saves or why it
    was left.

    Attributes:
        taken: the regions.
        left: those that stay in the graph, with reasons.
        calls: the number of calls in the graph.
        search_seconds: duration of the search.
        off: why there was no search, or "".
        note: the given patterns that match no module path, and which paths there are; or "".
    """

    taken: tuple[RepeatedSubgraph, ...]
    left: tuple[RepeatedSubgraph, ...]
    calls: int
    search_seconds: float
    off: str = ""
    note: str = ""

    @property
    def covered(self) -> int:
        """Number of graph calls that are in regions."""
        return sum(item.copies * item.calls for item in self.taken)

    @property
    def region_calls(self) -> int:
        """Number of region calls that replace them."""
        return sum(item.copies for item in self.taken)

    @property
    def saved_seconds(self) -> float:
        """Estimated compile time saved."""
        return sum(item.saved_seconds for item in self.taken)

    def _repr_html_(self) -> str:
        rows = [
            (
                r.name,
                r.copies,
                r.calls,
                "one region" if r.taken else f"left, {r.reason}",
                f"{r.saved_seconds:.1f} s",
                r.costs,
            )
            for r in (*self.taken, *self.left)
        ]
        head = ("modules", "copies", "calls", "became", "compile time saved", "costs, as a region")
        return as_html(str(self).partition("\n")[0], head, rows)

    def joined(self, inner: RegionReport) -> RegionReport:
        """Combine this report with that of a nested graph: a checkpointed function."""
        return RegionReport(
            self.taken + inner.taken,
            self.left + inner.left,
            self.calls + inner.calls,
            self.search_seconds + inner.search_seconds,
            self.off,
            "; ".join(filter(None, [self.note, inner.note])),
        )

    def __str__(self) -> str:
        if self.off:
            return f"no regions: {self.off}"
        if self.note and not self.taken and not self.left:
            return f"no regions in a graph of {self.calls} calls: {self.note}"
        if not self.taken and not self.left:
            return f"nothing is repeated in a graph of {self.calls} calls; searched in {self.search_seconds:.3f} s"
        searched = f"searched in {self.search_seconds:.3f} s"
        if self.taken:
            kinds = "1 region" if len(self.taken) == 1 else f"{len(self.taken)} regions"
            head = (
                f"{self.covered} of {self.calls} calls are in {kinds}, called {_times(self.region_calls)}; "
                f"{_saved(self.saved_seconds)}; {searched}"
            )
        else:
            head = f"none of {self.calls} calls is in a region; {searched}"
        return "\n".join(filter(None, [head, *map(str, self.taken), *map(str, self.left), self.note]))


def regions(
    graph: fx.GraphModule, choice: str | Sequence[str] = "auto", *, cost: CostModel | None = None
) -> RegionReport:
    """Find a graph's repeated subgraphs, and decide which would become regions, without compiling anything.

    Args:
        graph: a graph with fake values: Dynamo's, or one of :func:`fxpasses.capture`.
        choice: like the option ``regions``: ``"auto"``, ``"always"`` or patterns of module paths.
        cost: the cost model that decides for ``"auto"``.

    Raises:
        OptionsError: if ``choice`` is not such a choice.
        RegionGraphError: if ``graph`` is not a graph, or its values are unknown.

    >>> import torch, fxpasses
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))
    >>> graph = fxpasses.capture(model, torch.ones(2, 4)).forward
    >>> fxpasses.regions(graph).taken  # too small to be worth it
    ()
    """
    chosen = check_regions("regions", choice)
    check_type("regions", "cost", cost, (CostModel, type(None)), "a fxpasses.CostModel")
    if not isinstance(graph, fx.GraphModule):
        raise RegionGraphError(graph, f"a {type(graph).__name__} is no torch.fx.GraphModule")
    calls = [n for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    if calls and all(value_of(node) is None for node in calls):
        raise RegionGraphError(graph, "nothing is known of the values of this graph (shapes, types)")
    return make_report(graph, search(graph, chosen, cost), {})


def make_report(
    gm: fx.GraphModule, found: Search, compiled: Mapping[int, CompiledRegion], off: str = ""
) -> RegionReport:
    """Make the report of a search.

    Args:
        gm: the graph.
        found: the result of the search.
        compiled: the compiled region of each item of ``found.taken`` that has one, by the item's ``id``.
        off: why there was no search, or "".
    """
    taken = tuple(_describe(found, item, True, compiled.get(id(item))) for item in found.taken)
    left = tuple(_describe(found, item, False, None) for item in found.left)
    return RegionReport(taken, left, len(found.facts.calls), found.seconds, off, _unmatched(found))


def _unmatched(found: Search) -> str:
    """Describe the patterns that matched nothing, and the paths closest to them."""
    if not found.unmatched:
        return ""
    paths = list(dict.fromkeys(path for modules in found.facts.modules for path, _ in modules if path))
    near = dict.fromkeys(p for u in found.unmatched for p in get_close_matches(u, paths, n=3, cutoff=0.3))
    shown = [*near, *(p for p in paths if p not in near)][:6]
    there = f"paths here: {', '.join(shown)}" + (", ..." if len(paths) > len(shown) else "")
    patterns = ", ".join(map(repr, found.unmatched))
    return f"no module's path matches {patterns}; {there if paths else 'no call here belongs to a module'}"


def _saved(seconds: float) -> str:
    if round(seconds, 1) < 0:
        return f"takes about {-seconds:.1f} s more to compile"
    return f"saves about {abs(seconds):.1f} s of compile time"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _describe(
    found: Search, item: IsomorphicSubgraphs, taken: bool, region: CompiledRegion | None
) -> RepeatedSubgraph:
    calls: Any = found.facts.calls
    first, last = calls[item.subgraphs[0].start], calls[item.subgraphs[0].stop - 1]
    return RepeatedSubgraph(
        name=_pattern(item.modules) or f"{first.name} to {last.name}",
        copies=len(item.subgraphs),
        calls=item.length,
        nodes=tuple(calls[w.start].name for w in item.subgraphs),
        modules=tuple(item.modules),
        taken=taken,
        reason=item.reason,
        saved_seconds=item.estimate.saved_seconds,
        run_seconds=item.estimate.run_seconds,
        kept_bytes=item.estimate.kept_bytes,
        compile_seconds=region.seconds if region is not None else None,
        key=region.key if region is not None else "",
    )


def _pattern(modules: list[str]) -> str:
    """Summarize ``blocks.0``, ``blocks.1``, ... as ``blocks.*``; "" if there is no common form.

    >>> _pattern(["blocks.0.mlp", "blocks.1.mlp"])
    'blocks.*.mlp'
    """
    forms = {re.sub(r"\b\d+\b", "*", path) for path in modules}
    if "" in forms or len(forms) != 1:
        return ""
    return modules[0] if len(set(modules)) == 1 else forms.pop()
