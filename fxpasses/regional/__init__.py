"""Repeated layers: found in the graph, compiled once, called wherever they occur.

::

    Dynamo graph ── facts ── search ──── repeated subgraphs worth a region
        each kind:  region graph  ── compile (AOTAutograd, passes, partition, Inductor) ── operators
    Dynamo graph ── stitch ── the same graph with calls of the operators ── the pipeline, as any other graph
"""

from fxpasses.regional._torch_floats import floats_of_one_graph
from fxpasses.regional.cost_model import CostModel
from fxpasses.regional.errors import RegionContractError, RegionGraphError
from fxpasses.regional.explain import RegionReport, RepeatedSubgraph, regions
from fxpasses.regional.region_operators import communicating_graph, compiled_callable
from fxpasses.regional.runtime import hold_regions
from fxpasses.regional.stitch import with_regions

__all__ = [
    "CostModel",
    "RegionContractError",
    "RegionGraphError",
    "RegionReport",
    "RepeatedSubgraph",
    "communicating_graph",
    "compiled_callable",
    "floats_of_one_graph",
    "hold_regions",
    "regions",
    "with_regions",
]
