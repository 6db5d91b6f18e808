"""Regions of a model that is split into several graphs, as by DDP.

Buckets are cut at region boundaries, and equal layers are compiled once, whatever their bucket. Regions are
found in the graph of the whole model, before it is cut. A bucket may hold a single layer, which is still a
region.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpasses.compiling.options import Options
from fxpasses.regional.cost_model import CostModel, Estimate
from fxpasses.regional.facts import read_facts, wiring
from fxpasses.regional.region_search import IsomorphicSubgraphs, Search, Subgraph, search


@dataclass
class Plan:
    """The regions of a model.

    Attributes:
        layers: for each layer, its number of calls, what a region saves, and the path of its module.
        known: regions that are already compiled.
    """

    layers: list[tuple[int, Estimate, str]] = field(default_factory=list)
    known: dict[Any, Any] = field(default_factory=dict)


_LAYER = "fxpasses_layer"
"""The ``meta`` key of a call's layer number. Cutting a graph copies metadata."""
_plan: ContextVar[Plan | None] = ContextVar("regions_of_buckets", default=None)


def known_regions() -> dict[Any, Any]:
    """Return the compiled regions that graphs of one model share; empty if a model is one graph."""
    plan = _plan.get()
    return {} if plan is None else plan.known


@contextmanager
def planned_buckets(gm: fx.GraphModule, keywords: Mapping[str, Any]) -> Iterator[Callable[[fx.Node], bool]]:
    """Compile graphs inside as buckets of one model. Yields whether the model may be cut before a node.

    Args:
        gm: the graph of the model.
        keywords: the backend's keyword arguments.
    """
    options = Options.parse(keywords.get("options"), keywords.get("mode"))
    found = search(gm, options.regions, CostModel.for_compiler(options.compiler))
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    plan = Plan()
    inside: set[int] = set()
    for item in found.taken:
        for subgraph, path in zip(item.subgraphs, item.modules, strict=True):
            calls = found.facts.calls[subgraph.start : subgraph.stop]
            for call in calls:
                call.meta[_LAYER] = len(plan.layers)
            plan.layers.append((len(calls), item.estimate, path))
            inside.update(range(place[calls[0]] + 1, place[calls[-1]] + 1))
    token = _plan.set(plan)
    try:
        yield lambda node: place[node] not in inside
    finally:
        _plan.reset(token)


def planned_search(gm: fx.GraphModule) -> Search | None:
    """Return the regions of a bucket, as found in the whole model; ``None`` if a model is one graph."""
    plan = _plan.get()
    if plan is None or not plan.layers:
        return None
    result = Search(read_facts(gm))
    facts = result.facts
    groups: dict[Any, list[tuple[Subgraph, Estimate, str]]] = defaultdict(list)
    layers = itertools.groupby(enumerate(facts.calls), lambda place: place[1].meta.get(_LAYER))
    for number, places in layers:
        if number is None:
            continue
        start, stop = next(places)[0], 1 + max((place for place, _ in places), default=0)
        length, estimate, path = plan.layers[number]
        if stop - start == length and facts.balanced(start, stop):
            same = tuple(facts.tokens[start:stop]), wiring(facts, start, stop)[0]
            groups[same].append((Subgraph(start, stop), estimate, path))
    for group in groups.values():
        subgraphs, estimates, paths = zip(*group, strict=True)
        result.taken.append(IsomorphicSubgraphs(list(subgraphs), estimates[0], "", list(paths)))
    return result
