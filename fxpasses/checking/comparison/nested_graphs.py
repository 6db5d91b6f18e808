"""Rewrites inside nested graphs, which operators such as ``torch.cond`` call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fake.seam.pytree import tree_map
from fxpasses.checking.comparison.windows import changed_nodes
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import Run, copied
from fxpasses.graphs.rewriting import subgraphs

_SEED = 20


@dataclass(frozen=True)
class InnerRewrite:
    """A nested graph that a pass changed.

    Attributes:
        name: of the attribute that holds it.
        before: the nested graph before.
        after: the nested graph after.
        inputs: those of its first call, or for a branch that is not taken, those that it would get.
        called: whether it is called.
        caller: name of the call that gets it.
    """

    name: str
    before: fx.GraphModule
    after: fx.GraphModule
    inputs: list[Any]
    called: bool
    caller: str


def inner_rewrites(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]
) -> list[InnerRewrite]:
    """Find the nested graphs that a pass changed, and their inputs for some inputs of the outer graph.

    Args:
        before: the graph before.
        after: the graph after.
        inputs: of the outer graph.
    """
    graphs = subgraphs(after)
    changed = {
        name: (graph, graphs[name])
        for name, graph in subgraphs(before).items()
        if name in graphs and any(changed_nodes(graph, graphs[name]))
    }
    if not changed:
        return []
    run = _RecordingRun(before)
    run(cloned(inputs), _SEED)
    found = []
    for name, (mine, theirs) in changed.items():
        given = run.called.get(mine, run.branch_inputs.get(mine))
        if given is not None:
            found.append(InnerRewrite(name, mine, theirs, given, mine in run.called, run.callers[mine]))
    return found


class _RecordingRun(Run):
    """Records the first inputs of each graph inside, and those that a branch of ``cond`` would get."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.called: dict[fx.GraphModule, list[Any]] = {}
        self.branch_inputs: dict[fx.GraphModule, list[Any]] = {}
        self.callers: dict[fx.GraphModule, str] = {}

    def _runnable(self, gm: fx.GraphModule) -> Callable[..., Any]:
        inner = super()._runnable(gm)

        def call(*args: Any) -> Any:
            self._record_inputs(self.called, gm, args)
            return inner(*args)

        return call

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call. Args: those of :meth:`torch.fx.Interpreter.call_function`."""
        if str(target) == "cond" and self.current is not None:
            for branch in self.current.args[1:3]:
                self._record_inputs(self.branch_inputs, self.fetch_attr(str(branch.target)), args[3])  # type: ignore[union-attr]
        return super().call_function(target, args, kwargs)

    def _record_inputs(
        self, where: dict[fx.GraphModule, list[Any]], gm: fx.GraphModule, args: Sequence[Any]
    ) -> None:
        where.setdefault(gm, list(tree_map(copied, args)))
        if self.current is not None:
            self.callers.setdefault(gm, self.current.name)
