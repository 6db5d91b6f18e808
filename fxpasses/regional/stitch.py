"""Replace the repeated subgraphs of a Dynamo graph with calls of compiled regions."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpasses.compiling._torch_inductor import saves_compiled_code
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.counters import Fallback, counters
from fxpasses.errors import CaptureError, HandoverError, PartitionError, StageError
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.regional import _torch, _torch_dtensor, region_operators
from fxpasses.regional.buckets import planned_search
from fxpasses.regional.compiled_region import CompiledRegion
from fxpasses.regional.cost_model import CostModel
from fxpasses.regional.errors import RegionRefused
from fxpasses.regional.facts import GraphFacts, value_of
from fxpasses.regional.gathers import equal_gathers
from fxpasses.regional.region_graph import RegionGraph, extract_region, input_tensors
from fxpasses.regional.region_report import RegionReport, make_report
from fxpasses.regional.region_search import Search, Subgraph, search
from fxpasses.regional.writes import changed_memory

log = logging.getLogger(__name__)

_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


KnownRegions = dict[Any, CompiledRegion]
"""The regions of one Dynamo graph, by their calls. Equal layers in two checkpoints share one."""
CompileRegion = Callable[[RegionGraph], CompiledRegion]
"""Compiles the graph of a region, starting with the repeated subgraphs inside it."""


@dataclass
class RegionalizedGraph:
    """A graph whose regions are compiled.

    Attributes:
        gm: the graph to compile: the original if there is no region.
        report: the repeated subgraphs, and which became regions.
        regions: the regions that it calls. The owner of the compiled graph must keep them alive.
    """

    gm: fx.GraphModule
    report: RegionReport
    regions: list[CompiledRegion] = field(default_factory=list)


def with_regions(
    gm: fx.GraphModule,
    options: Options,
    observers: Sequence[Observer],
    known: KnownRegions,
    compile: CompileRegion,
    *,
    trace_gathers: CompileRegion,
    inside: bool = False,
) -> tuple[fx.GraphModule, list[CompiledRegion]]:
    """Compile each repeated subgraph of a Dynamo graph once, and call it wherever it occurs.

    With ``on_failure="eager"``, a stage that fails is counted and leaves the graph unchanged.

    Args:
        gm: a Dynamo graph whose floats are settled.
        options: the options of the compilation; ``options.regions`` decides what is taken.
        observers: observers of the compilation of ``gm``, which are told of the regions.
        known: regions that are already compiled; new ones are added.
        compile: compiles the graph of a region.
        trace_gathers: traces the graph that gathers a layer's parameters.
        inside: whether ``gm`` is a region's graph. Its caller then handles failures and reports.

    Returns:
        The graph to compile (``gm``, or a copy that calls regions) and its regions, which the caller must
        keep alive.

    Raises:
        StageError: if a stage fails on a region, and failures are to be raised.
    """
    if options.regions == "off":
        return gm, []
    if saves_compiled_code():
        log.info("no regions: compiled code is saved, and other processes have no such operators")
        return gm, []
    if inside:
        done = _regionalize(gm, options, known, compile)
        return done.gm, done.regions
    try:
        with counters.timed("regions"):
            done = _regionalize(gm, options, known, compile, whole=True)
    except StageError as error:
        if options.on_failure == "raise":
            error.advise()
            raise
        counters.add_fallback(Fallback(error.stage, f"in a region: {error.reason}", str(error.location)))
        log.warning("compiling without regions instead (on_failure=%r): %s", options.on_failure, error)
        return gm, []
    log.info("%s", done.report)
    counters.add_region_report(done.report, len(done.report.taken), done.report.region_calls)
    for observer in observers:
        if done.report.taken or done.report.left:
            observer.regions(done.report)
        if done.regions:
            observer.calls_regions(gm, done.gm)
    if options.check == "values":  # the check needs collectives to be visible in the graph
        return done.gm, done.regions
    with counters.timed("regions"):
        work, gathering = _with_gathers(done.gm, known, trace_gathers)
    return work, [*done.regions, *gathering]


def _with_gathers(
    gm: fx.GraphModule, known: KnownRegions, trace: CompileRegion
) -> tuple[fx.GraphModule, list[CompiledRegion]]:
    """Return the graph with the gathers of equal layers as calls of one operator each."""
    found, groups = equal_gathers(gm)
    if not groups:
        return gm, []
    work = copy_graph(gm)
    _torch.copy_dynamo_attributes(gm, work)
    translated = _translate_search(found, gm, work)
    symbols = _symbols(work)
    traced: list[tuple[list[Subgraph], RegionGraph, CompiledRegion]] = []
    for subgraphs in groups:
        try:
            traced.append((subgraphs, *_compile(work, translated, subgraphs, symbols, known, trace)))
        except (RegionRefused, StageError) as error:
            log.info("gathers of %d equal layers are traced one by one: %s", len(subgraphs), error)
    stitcher = _Stitcher(work, translated, symbols)
    for subgraphs, region_graph, region in traced:
        for subgraph in subgraphs:
            stitcher.replace(subgraph, region_graph, region)
    work.graph.lint()
    work.recompile()
    return work, [region for *_, region in traced]


def _regionalize(
    gm: fx.GraphModule,
    options: Options,
    known: KnownRegions,
    compile: CompileRegion,
    *,
    runs_twice: bool = False,
    whole: bool = False,
) -> RegionalizedGraph:
    """Find a graph's repeated subgraphs, compile each kind once, and call it wherever it occurs.

    ``runs_twice`` tells whether the backward pass recomputes the graph (a checkpointed function), ``whole``
    whether Dynamo made the graph.
    """
    refused = _torch.reason_against_regions() if options.compiler == "inductor" else ""
    choice = "off" if refused else options.regions
    found = planned_search(gm) if whole and not refused else None
    found = found or search(gm, choice, CostModel.for_compiler(options.compiler))
    done = _replace_regions(gm, found, refused, runs_twice, known, compile)
    return (
        done if choice == "off" else _regionalize_checkpoints(done, gm, found.facts, options, known, compile)
    )


def _replace_regions(
    gm: fx.GraphModule,
    found: Search,
    refused: str,
    runs_twice: bool,
    known: KnownRegions,
    compile: CompileRegion,
) -> RegionalizedGraph:
    """Replace the regions of a graph by calls. ``refused`` says why there was no search."""
    if not found.taken:
        return RegionalizedGraph(gm, make_report(gm, found, {}, refused))
    work = copy_graph(gm)
    _torch.copy_dynamo_attributes(gm, work)
    translated = _translate_search(found, gm, work)
    symbols = _symbols(work)
    compiled: dict[int, tuple[RegionGraph, CompiledRegion]] = {}
    for number, item in enumerate(translated.taken):
        try:
            compiled[number] = _compile(work, translated, item.subgraphs, symbols, known, compile)
            if runs_twice and compiled[number][1].random:
                del compiled[number]
                raise RegionRefused("its checkpoint has to sample the same random numbers again")
        except RegionRefused as refusal:
            item.reason = refusal.reason
        except (CaptureError, PartitionError, HandoverError) as error:
            # The whole graph will show whether it can be compiled at all.
            log.warning("a repeated subgraph is not compiled on its own: %s", error)
            item.reason = f"stage {error.stage!r} failed on it: {error.reason}"
    stitcher = _Stitcher(work, translated, symbols)
    for number, (region_graph, region) in compiled.items():
        for subgraph in translated.taken[number].subgraphs:
            stitcher.replace(subgraph, region_graph, region)
    left = [item for number, item in enumerate(found.taken) if number not in compiled]
    regions = {id(found.taken[number]): region for number, (_, region) in compiled.items()}
    found.taken = [item for number, item in enumerate(found.taken) if number in compiled]
    found.left = left + found.left
    if not compiled:
        return RegionalizedGraph(gm, make_report(gm, found, {}, refused))
    work.graph.lint()
    work.recompile()
    return RegionalizedGraph(work, make_report(gm, found, regions, refused), list(regions.values()))


def _regionalize_checkpoints(
    done: RegionalizedGraph,
    gm: fx.GraphModule,
    facts: GraphFacts,
    options: Options,
    known: KnownRegions,
    compile: CompileRegion,
) -> RegionalizedGraph:
    """Also replace repeated subgraphs of checkpointed functions, which the backward pass calls again."""
    left = {node.name: node for node in done.gm.graph.nodes if _torch.is_checkpoint_call(node)}
    work, report, regions = done.gm, done.report, list(done.regions)
    for index, node in enumerate(facts.calls):
        if node.name not in left or not _torch.is_checkpoint_call(left[node.name]):
            continue
        name = str(node.args[0].target)  # type: ignore[union-attr]
        body = gm.get_submodule(name)
        assert isinstance(body, fx.GraphModule)
        reason = _reason_not_to_replace(body, facts, index)
        if reason:
            found = search(body, options.regions, CostModel.for_compiler(options.compiler))
            for item in found.taken:
                item.reason = reason
            found.taken, found.left = [], found.taken + found.left
            inner = RegionalizedGraph(body, make_report(body, found, {}))
        else:
            inner = _regionalize(body, options, known, compile, runs_twice=True)
        report = report.joined(inner.report)
        regions += inner.regions
        if inner.gm is not body:
            work = copy_graph(gm) if work is gm else work
            work.set_submodule(name, inner.gm)
    if work is not done.gm:
        _torch.copy_dynamo_attributes(gm, work)
    return RegionalizedGraph(work, report, regions)


def _reason_not_to_replace(body: fx.GraphModule, facts: GraphFacts, index: int) -> str:
    """Return why a checkpointed function must not call regions, or ""."""
    if _torch.checkpoint_policy(body) is not None:
        return "its checkpoint decides for each operator whether to keep its result"
    if facts.autocast[index] or facts.grad_mode[index] is not None:
        return "autocast or the gradient mode is set around its checkpoint"
    return ""


def _compile(
    work: fx.GraphModule,
    found: Search,
    subgraphs: Sequence[Subgraph],
    symbols: dict[Any, fx.Node],
    known: KnownRegions,
    compile: CompileRegion,
) -> tuple[RegionGraph, CompiledRegion]:
    """Compile the graph of isomorphic subgraphs."""
    region_graph = extract_region(work, found.facts, subgraphs, symbols)
    calls = found.facts.calls[subgraphs[0].start : subgraphs[0].stop]
    # Functions of the same name may differ, and so may equal meshes.
    same = region_graph.text, tuple(id(node.target) for node in calls), region_graph.meshes
    if same not in known:
        known[same] = compile(region_graph)
    return region_graph, known[same]


def _translate_search(found: Search, old: fx.GraphModule, new: fx.GraphModule) -> Search:
    """Translate search results to a copy of the graph."""
    same = dict(zip(old.graph.nodes, new.graph.nodes, strict=True))
    facts = found.facts
    translated = dataclasses.replace(
        facts,
        graph=new.graph,
        calls=[same[n] for n in facts.calls],
        position={same[n]: i for n, i in facts.position.items()},
        reads=[[same[n] for n in reads] for reads in facts.reads],
        autocast=[tuple(same[n] for n in opened) for opened in facts.autocast],
    )
    return Search(translated, list(found.taken), [], found.seconds)


def _symbols(gm: fx.GraphModule) -> dict[Any, fx.Node]:
    """Return the placeholder of each symbol in the graph's sizes."""
    known: dict[Any, fx.Node] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            known.setdefault(_torch.expression(value), node)
    return known


class _Stitcher:
    """Replaces subgraphs of one graph with calls of regions."""

    def __init__(self, gm: fx.GraphModule, found: Search, symbols: dict[Any, fx.Node]) -> None:
        self.graph, self.facts, self.symbols = gm.graph, found.facts, symbols
        self.replaced: dict[fx.Node, fx.Node] = {}
        """Maps erased nodes to their replacements."""
        self.mutated_storages = changed_memory(found.facts.calls)
        """Memory that some call of the graph writes to."""

    def replace(self, subgraph: Subgraph, region_graph: RegionGraph, region: CompiledRegion) -> None:
        """Replace one subgraph with a call of a region.

        Args:
            subgraph: one of the isomorphic subgraphs.
            region_graph: their graph.
            region: the compiled region.
        """
        calls = self.facts.calls[subgraph.start : subgraph.stop]
        outside = input_tensors(self.facts, subgraph)
        tensors = [self._current_node(node) for node in outside]
        values: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(calls[-1].next):
            given = list(tensors)
            for index in {s.index for s in region.outputs if s.is_input and region_graph.wraps[s.index]}:
                given[index] = self._to_local(tensors[index], region.grad_placements[index])
            for index in {s.index for s in region.saved if s.is_input}:
                # The backward pass needs the current value, not what is written there later.
                if _torch.storage_of(value_of(outside[index])) in self.mutated_storages:
                    if region_graph.wraps[index]:
                        given[index] = self._to_local(tensors[index], region.grad_placements[index])
                    example = value_of(given[index])
                    given[index] = self._call(calls[0], torch.clone, (given[index],), example)
            sizes = [self.symbols[s] for s in region_graph.symbols]
            results = self._call(calls[0], region_operators.REGION, (region.key, given, sizes), None)
            for number, call_index in enumerate(region_graph.outputs):
                example = value_of(calls[call_index])
                values[calls[call_index]] = self._result(calls[0], results, number, example)
            for number, index in enumerate(region_graph.written):
                example = value_of(outside[index])
                position = len(region_graph.outputs) + number
                new = self._call(calls[0], operator.getitem, (results, position), example)
                copy = self.graph.call_method("copy_", (tensors[index], new))
                copy.meta["example_value"] = example
            for call_index, original in region_graph.same.items():
                values[calls[call_index]] = (
                    self._current_node(outside[-1 - original]) if original < 0 else values[calls[original]]
                )
            for call_index in region_graph.copied:
                values[calls[call_index]] = self.graph.node_copy(
                    calls[call_index], lambda n: values.get(n, n)
                )
        for old, new in values.items():
            old.replace_all_uses_with(new)
        self.replaced.update(values)
        for node in reversed(calls):
            self.graph.erase_node(node)

    def _to_local(self, node: fx.Node, grad_placements: Any) -> fx.Node:
        """Return the local tensor of a DTensor, with placements for the gradient that a region returns."""
        local = self.graph.call_method("to_local", (node,), {"grad_placements": grad_placements})
        local.meta = {name: node.meta[name] for name in _INHERITED if name in node.meta}
        local.meta["example_value"] = _torch_dtensor.local_of(value_of(node))
        return local

    def _result(self, like: fx.Node, results: fx.Node, number: int, example: Any) -> fx.Node:
        """Return one of a region's results, as a DTensor if it is one outside."""
        local = _torch_dtensor.local_of(example)
        value = self._call(like, operator.getitem, (results, number), local)
        if local is example:
            return value
        return self._call(like, _torch_dtensor.FromLocal(example), (value,), example)

    def _call(self, like: fx.Node, target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {name: like.meta[name] for name in _INHERITED if name in like.meta}
        if example is not None:
            node.meta["example_value"] = example
        return node

    def _current_node(self, node: fx.Node) -> fx.Node:
        """Return the node that now stands for a node, following chains of replacements."""
        while node in self.replaced:
            node = self.replaced[node]
        return node
