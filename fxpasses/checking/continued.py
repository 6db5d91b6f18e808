"""Running the rest of a graph in float64, from values that are put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from fxpasses.checking.collectives import simulated
from fxpasses.checking.interpret import ExactRun, Run, as_float64, as_recorded_dtype, call_in_float64
from fxpasses.graphs.aliasing import is_mutating, is_random
from fxpasses.graphs.rewriting import value_of

__all__ = ["ContinuedRun"]


class ContinuedRun(Run):
    """Runs a graph with some values given, and what depends on them in float64.

    Args:
        gm: the graph.
        given: the values, by the names of their nodes.
    """

    def __init__(self, gm: fx.GraphModule, given: Mapping[str, Any]) -> None:
        super().__init__(gm)
        self._given = given
        self._behind: set[str] = set()
        for node in gm.graph.nodes:
            if any(v.name in self._behind or v.name in given for v in node.all_input_nodes):
                self._behind.add(node.name)

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self._given:
            return super().run_node(n)
        self.current = n
        return tree_map(as_float64, self._given[n.name])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call: in float64 behind the values that were put in. Args: those of :meth:`torch.fx.Interpreter.call_function`."""
        node = self.current
        assert node is not None
        if node.name not in self._behind:
            return super().call_function(target, args, kwargs)
        if is_random(node) or is_mutating(node):
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda a: as_recorded_dtype(self.env[a], value_of(a))
            )
            return simulated(target)(*args, **kwargs)
        return call_in_float64(target, args, kwargs)

    def inner(self, gm: fx.GraphModule) -> Run:
        return ExactRun(gm) if self.current is not None and self._wide_user() else Run(gm)

    def _wide_user(self) -> bool:
        assert self.current is not None
        return any(user.name in self._behind for user in self.current.users)
