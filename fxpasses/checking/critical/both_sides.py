"""The two sides of a window on many inputs that differ in few: only what depends on these runs again."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.comparison.same_function import JUMP
from fxpasses.checking.comparison.windows import Window, changed_values
from fxpasses.checking.critical.given_values import input_names
from fxpasses.checking.execution.interpret import RUN_ERRORS, ExactRun, as_float64
from fxpasses.exact import Original
from fxpasses.exact.machine import UnsupportedCall
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.rewriting import outputs_of


class BothSides:
    """Tells whether the sides of a window differ, on inputs of which some are set.

    Args:
        window: what changed.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._given = dict(zip(input_names(window), map(as_float64, window.inputs), strict=True))
        sides = window.before, window.after
        self._is_pure = not any(is_mutating(n) or uses_rng(n) for gm in sides for n in gm.graph.nodes)
        self._runs = [ExactRun(gm, keep=self._is_pure) for gm in sides]
        self._last: dict[str, Any] = {}

    @functools.cached_property
    def _start(self) -> list[dict[str, Any]] | None:
        """The values of both sides where no input is set; ``None`` if an operator cannot run."""
        if not self._is_pure or None in [run.results(list(self._given.values())) for run in self._runs]:
            return None
        return [dict(run.values) for run in self._runs]

    @functools.cached_property
    def _theirs(self) -> set[str]:
        """Calls of the second side whose values are not those of the first side under the same names."""
        return _following(self._window.after, changed_values(self._window.before, self._window.after)[1])

    def are_different(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the sides are different functions at these inputs, by name."""
        given = self._given | {name: v for name, v in values.items() if name in self._given}
        mine, theirs = self._results(given, values)
        if mine is None or theirs is None:
            return False
        other = {at for at, pair in enumerate(zip(mine, theirs, strict=True)) if not _is_close(*pair)}
        if not other or other <= tie_dependent_outputs(
            self._window.before, list(given.values()), self._window.after
        ):
            return False
        on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in given.values()]
        try:
            return Original(self._window.before, on_cpu).find_difference(self._window.after) is not None
        except (ValueError, UnsupportedCall):
            return True  # the whole graph decides

    def _results(self, given: Mapping[str, Any], moved: Collection[str]) -> Sequence[list[Any] | None]:
        if self._start is None:
            return [run.results(list(given.values())) for run in self._runs]
        first, second = self._start
        (before, after), graphs = self._runs, (self._window.before, self._window.after)
        try:
            mine = {**first, **given, **before.run_calls(_following(graphs[0], moved), {**first, **given})}
            known = {**second, **{name: v for name, v in mine.items() if name not in self._theirs}}
            theirs = {**known, **after.run_calls(_following(graphs[1], moved) & self._theirs, known)}
        except RUN_ERRORS:
            return None, None
        return [_outputs(gm, values) for gm, values in zip(graphs, (mine, theirs), strict=True)]


def _outputs(gm: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    return [fx.map_arg(value, lambda n: values[n.name]) for value in outputs_of(gm.graph)]


def _following(gm: fx.GraphModule, names: Collection[str]) -> set[str]:
    """Given values of a graph, and the calls that depend on them."""
    found: set[str] = set(names)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(value.name in found for value in node.all_input_nodes):
            found.add(node.name)
    return found


def _is_close(a: Any, b: Any) -> bool:
    """Whether no element differs, relative to itself, by more than an activation that switches formulas."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return bool(a is b or (not isinstance(a, Tensor) and a == b))
    a, b = computable(a), computable(b)
    size = torch.maximum(a.abs(), b.abs()) if a.is_floating_point() or a.is_complex() else 0
    return (
        bool(((a == b) | (a != a) | ((a - b).abs() <= JUMP * size)).all())
        if a.dtype is not torch.bool
        else torch.equal(a, b)
    )
