"""The value check of a region: its graphs are compared once, on the first inputs of any of its copies.

The graph around sees a region as one operator. When that graph is checked, its operators also run in float64:
a region then runs its graph, not the compiled code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.checking.comparison.same_function import is_native
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.checking.watch import ValueCheck
from fxpasses.compiling.observing import Observer, RegionCheck
from fxpasses.compiling.options import Options
from fxpasses.counters import Fallback, counters
from fxpasses.errors import StageError
from fxpasses.graphs.rewriting import copy_graph, outputs_of
from fxpasses.regional.aliases import return_only, separate_aliases
from fxpasses.regional.compiled_region import Exact, Source

log = logging.getLogger(__name__)


class RegionValueCheck(ValueCheck, RegionCheck):
    """Compares the graphs before and after each pass on a region.

    Args:
        options: of the surrounding compilation; ``on_failure`` decides how to handle a wrong backward graph.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options.repro_directory())
        self._options = options

    def watch_backward(
        self, compiled: Callable[..., Any], gradients: Sequence[Source | None]
    ) -> Callable[..., Any]:
        """Wrap a compiled backward graph so that its first calls are checked.

        Args:
            compiled: takes a list of sizes, saved tensors, gradients.
            gradients: how gradients are made from its outputs. A replacement must return the same.
        """

        def graph_before(error: StageError, before: fx.GraphModule) -> Callable[..., Any]:
            # The forward pass is over: the graph before the wrong pass runs instead.
            instead = copy_graph(before)
            returned, sources = separate_aliases(instead, outputs_of(instead.graph))
            if self._options.on_failure == "raise" or sources != list(gradients):
                raise error
            return_only(instead, returned)
            counters.add_fallback(Fallback(error.stage, f"in a region: {error.reason}", str(error.location)))
            log.warning(
                "running a region's backward graph in eager (on_failure=%r): %s",
                self._options.on_failure,
                error,
            )
            return instead.forward

        return self.watch("backward", compiled, graph_before)

    def exact_run(self, gm: fx.GraphModule) -> Exact:
        """Return a callable that runs a copy of a graph of the region in float64."""
        graph = copy_graph(gm)
        values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        dtypes = [value.dtype for value in values if isinstance(value, torch.Tensor)]
        exact = ExactRun(graph)

        def run(inputs: list[Any]) -> list[Any]:
            try:
                return exact(inputs)
            finally:
                exact.reset()

        return Exact(dtypes, run, is_native(graph))


class RegionChecks(Observer):
    """Has each region of a graph checked by value."""

    def of_region(self, gm: fx.GraphModule) -> RegionChecks:
        return self

    def region_check(self, options: Options) -> RegionValueCheck:
        return RegionValueCheck(options)
