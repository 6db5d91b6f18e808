"""Regions: find repeated layers in a graph, compile each once, and call it wherever it occurs.

::

    Dynamo graph ── facts ── search ──── repeated subgraphs worth a region
        each kind:  region graph  ── compile_graph, as any other graph ── operators
    Dynamo graph ── stitch ── the same graph with calls of the operators
"""

from fxpasses.regional._torch_floats import floats_of_one_graph
from fxpasses.regional.buckets import known_regions, planned_buckets
from fxpasses.regional.compile_region import RegionCompiler
from fxpasses.regional.compiled_region import CompiledRegion, hold_regions
from fxpasses.regional.cost_model import CostModel
from fxpasses.regional.errors import RegionContractError, RegionGraphError, RegionRefused
from fxpasses.regional.floats import settle_floats
from fxpasses.regional.gathers import KeptGraphs, inline_gathers
from fxpasses.regional.region_graph import RegionGraph
from fxpasses.regional.region_operators import communicating_graph, compiled_callable, region_work
from fxpasses.regional.region_report import RegionReport, RepeatedSubgraph, regions
from fxpasses.regional.stitch import KnownRegions, with_regions
from fxpasses.regional.writes import changed_memory

__all__ = [
    "CompiledRegion",
    "CostModel",
    "KeptGraphs",
    "KnownRegions",
    "RegionCompiler",
    "RegionContractError",
    "RegionGraph",
    "RegionGraphError",
    "RegionRefused",
    "RegionReport",
    "RepeatedSubgraph",
    "changed_memory",
    "communicating_graph",
    "compiled_callable",
    "floats_of_one_graph",
    "hold_regions",
    "inline_gathers",
    "known_regions",
    "planned_buckets",
    "region_work",
    "regions",
    "settle_floats",
    "with_regions",
]
