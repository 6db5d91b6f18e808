"""Rewrites inside of nested graphs, which operators such as ``torch.cond`` call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import Run
from fxpasses.checking.values import changed_nodes
from fxpasses.graphs.rewriting import subgraphs

__all__ = ["inner_rewrite"]

_SEED = 20


def inner_rewrite(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]] | None:
    """Find the nested graph that a pass changed.

    Args:
        before: the graph before.
        after: the graph after.
        inputs: of the outer graph.

    Returns:
        The nested graph before and after, and the inputs of its first call. ``None`` when none was changed, or when the changed one
        is not called with these inputs.
    """
    graphs = subgraphs(after)
    changed = [
        (graph, graphs[name])
        for name, graph in subgraphs(before).items()
        if name in graphs and any(changed_nodes(graph, graphs[name]))
    ]
    if not changed:
        return None
    run = _RecordingRun(before)
    run(cloned(inputs), _SEED)
    return next(((mine, theirs, run.called[mine]) for mine, theirs in changed if mine in run.called), None)


class _RecordingRun(Run):
    """Remembers what each graph inside is called with first."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.called: dict[fx.GraphModule, list[Any]] = {}

    def _runnable(self, gm: fx.GraphModule) -> Callable[..., Any]:
        inner = super()._runnable(gm)

        def call(*args: Any) -> Any:
            self.called.setdefault(gm, list(tree_map(_copied, args)))
            return inner(*args)

        return call


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
