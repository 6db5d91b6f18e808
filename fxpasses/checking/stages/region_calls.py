"""Compare a graph that calls compiled regions with the graph that they were cut from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxpasses.checking.execution.inputs import Unsupported, cloned
from fxpasses.checking.faults.blame import first_difference
from fxpasses.compiling.graph_compilers import Compiler
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.pipeline.compile_graph import new_compiler


class NoRegions(Exception):
    """A graph calls no regions, so there is nothing to compare."""


class RegionGraphs(Observer):
    """Keeps the graphs that regions pass to the compiler.

    Attributes:
        found: the graphs, each as its passes left it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[fx.GraphModule] = []

    def of_region(self, gm: fx.GraphModule) -> RegionGraphs:
        return self

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        if kind != "joint":
            self.found.append(copy_graph(gm))


class RegionCalls(Observer):
    """The graphs in which regions were found, and the inputs of their first calls.

    Attributes:
        found: each graph before, the graph that calls regions instead, and inputs.
        graphs: what the regions are compiled from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[fx.GraphModule, fx.GraphModule, list[Any]]] = []
        self.graphs = RegionGraphs()
        self._waiting: list[list[Any]] = []

    def of_region(self, gm: fx.GraphModule) -> RegionGraphs:
        return self.graphs

    def calls_regions(self, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self._waiting.append([])
        self.found.append((before, after, self._waiting[-1]))

    def new_compiler(self, options: Options, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiler:
        """Make the compiler of a graph that calls regions.

        Args:
            options: of the compilation.
            gm: the graph.
            example_inputs: its inputs.

        Raises:
            NoRegions: it calls none.
        """
        if not self._waiting:
            raise NoRegions
        return new_compiler(options, gm, example_inputs)

    def wrap_compiled(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compiled`` to record the inputs of its first call, if the graph calls regions."""
        if not self._waiting:
            return compiled
        inputs = self._waiting.pop()

        def run(*args: Any) -> Any:
            if not inputs:
                with contextlib.suppress(Unsupported):
                    inputs.extend(cloned(args))
            return compiled(*args)

        return run

    def first_wrong_module(self) -> str:
        """The module of the first node whose value differs; of the first region, if no common node's does."""
        for before, after, inputs in self.found:
            if inputs and (module := first_difference(before, after, inputs).module):
                return module
        return ""
