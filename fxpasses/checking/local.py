"""Local comparison: each changed subgraph of a rewrite runs alone.

Deep inside a graph, the rounding of all that follows hides a mistake, the more the lower the precision. So the calls that
a pass changed are put into *changes* (those that depend on each other directly), and each change of both graphs runs alone, on
the values that the graph before has there. What a change gives to the rest of the graph has to be equal, but for the
rounding of the change's own calls. If that holds at every change, then the graphs compute the same.

Where it does not hold the change is suspected only: a pass may leave out what later calls cancel (the bias in front of a
batch norm). Then the graph before runs on from there in float64, once with the values of the change before and once
with those after, and the results decide. Where several changes are suspected, one may cancel what another one does, so that they are judged
together, with all that lies between them. But rounding cancels nothing: a change that is the same in exact arithmetic is judged alone, since
the rounding of all that lies between would hide it.

In low precision (bfloat16) rounding hides a wrong factor even at its change. There both changes run in float64, too: in exact arithmetic
they may differ by half a unit in the last place of the result, and what that does to the results of the graph may not be
more than what the rounding of the change's own calls does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpasses.checking.changes import Change, changes, graph_outputs, join_changes, merge_changes
from fxpasses.checking.continued import ContinuedRun
from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import (
    ORDERS,
    ExactRun,
    NoisyExactRun,
    RoundedRun,
    Run,
    allocates,
    as_float64,
    seeded,
)
from fxpasses.checking.reordered import Parts, parts_behind
from fxpasses.checking.rounding import perturbed_by_ulp
from fxpasses.checking.tolerance import Deviation, deviation
from fxpasses.graphs.aliasing import is_mutating, is_random
from fxpasses.graphs.rewriting import value_of

__all__ = ["Finding", "wrong_changes"]

_SAMPLES, _MORE_SAMPLES = 4, 10
_SEED = 20
_HALF_A_UNIT = math.sqrt(3)
"""How far the results of a change may be apart in exact arithmetic, as a multiple of the root mean square of a rounding error (a unit over the root
of 12): a constant may be held in lower precision, which moves all elements the same way."""
_ROUNDS = ((_SAMPLES, 0, 0), (_SAMPLES,) * 3, (_MORE_SAMPLES,) * 3)
"""Numbers of samples of each kind that a result is judged with, until it is right: as they are, with sums in parts, with sums in any order."""

_ALONE = 3
"""Number of suspected changes that are judged alone: each costs some runs of the graph, and the rounding that one pass brings about is much the
same everywhere."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_CANNOT_RUN = (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError, KeyError)


@dataclass(frozen=True)
class Finding:
    """A wrong result of the graph, and the change that makes it wrong.

    Attributes:
        position: index of the result: the graph's outputs, then its inputs after the run.
        deviation: of the result.
        change: the changed subgraph.
    """

    position: int
    deviation: Deviation
    change: Change


def wrong_changes(
    before: fx.GraphModule,
    after: fx.GraphModule,
    changed: tuple[Collection[str], Collection[str]],
    inputs: Sequence[Any],
    results: Sequence[Any],
) -> list[Finding] | None:
    """The results that a rewrite makes wrong, with the changes; ``None`` where changes cannot be run alone.

    That is so where the RNG is called, memory is written to or uninitialised memory is made among the changed
    calls, and where the order of the other RNG calls and writes is not the same.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each.
        inputs: the inputs to run on.
        results: the results of the graph before: its outputs, then its inputs after the run.
    """
    if not _can_be_taken_apart(before, after, changed):
        return None
    found = changes(before, after, changed)
    if any(not change.given for change in found):
        found = [change for change in found if change.given]
    if not found:
        return None
    comparison = _Comparison(before, after, found, inputs, results)
    suspects = [change for change in found if not comparison.agrees(change)]
    if not suspects:
        return []
    whole = suspects[0] if len(suspects) == 1 else join_changes(before, after, suspects)
    cancelled = len(suspects) > 1 and comparison.agrees(whole)
    deviations = {} if cancelled else comparison.at_the_results(whole)
    if deviations is None:
        return None
    if len(suspects) > 1 and not deviations:
        for change in filter(comparison.is_the_same_function, suspects[:_ALONE]):
            alone = comparison.at_the_results(change)
            if alone:
                return [Finding(position, how, change) for position, how in alone.items()]
    guilty = merge_changes(suspects)
    if len(suspects) > 1 and deviations:
        # The first that is wrong alone: one is enough to be told, and each costs some runs of the graph.
        guilty = next((change for change in suspects if comparison.at_the_results(change)), guilty)
    return [Finding(position, how, guilty) for position, how in deviations.items()]


def _can_be_taken_apart(
    before: fx.GraphModule, after: fx.GraphModule, changed: tuple[Collection[str], Collection[str]]
) -> bool:
    order = []
    for gm, names in zip((before, after), changed, strict=True):
        special = [n for n in gm.graph.nodes if n.op == "call_function" and (is_random(n) or is_mutating(n))]
        if any(n.name in names for n in special) or allocates(gm, names):
            return False
        order.append([n.name for n in special])
    return order[0] == order[1]


class _Comparison:
    """Runs changes alone, on values of the graph before."""

    def __init__(
        self,
        before: fx.GraphModule,
        after: fx.GraphModule,
        found: Sequence[Change],
        inputs: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        self._before, self._after, self._inputs, self._results = before, after, inputs, results
        self._graphs = (before, after)
        self._nodes = [{n.name: n for n in gm.graph.nodes} for gm in (before, after)]
        run = Run(before, keep=True)
        run(cloned(inputs), _SEED)
        self._values = run.values
        self._sums: dict[fx.Node, Parts | None] = {}

    def agrees(self, change: Change) -> bool:
        """Whether a change computes the same before and after, but for its own rounding."""
        try:
            if any(how is not None for how in self._differences(change)):
                return False
        except _CANNOT_RUN:
            return False
        return not self._differs_exactly(change)

    def is_the_same_function(self, change: Change) -> bool:
        """Whether a change computes the same before and after in exact arithmetic: then it can only round otherwise."""
        try:
            own, got = (self._evaluate(ExactRun(gm), change, side) for side, gm in enumerate(self._graphs))
            noisy = [self._evaluate(NoisyExactRun(self._before, seed), change, 0) for seed in range(_SAMPLES)]
        except _CANNOT_RUN:
            return False
        for position, (a, b) in enumerate(zip(own, got, strict=True)):
            if not (_is_floating(a) and _is_floating(b)):
                if not _equal(a, b):
                    return False
            elif (
                a.shape != b.shape
                or a.dtype is not b.dtype
                or deviation(a, a, [n[position] for n in noisy], b)
            ):
                return False
        return True

    def _differs_exactly(self, change: Change) -> bool:
        """Whether a change is another function of its inputs, in float64; asked in low precision only."""
        if not self._has_low_precision(change):
            return False
        try:
            own, got = (self._evaluate(ExactRun(gm), change, side) for side, gm in enumerate(self._graphs))
            noisy: list[list[Any]] = []
            for position, (a, b) in enumerate(zip(own, got, strict=True)):
                if not (_is_floating(a) and _is_floating(b)) or a.shape != b.shape or torch.equal(a, b):
                    continue
                dtype = self._dtype(change.given[position][0], a)
                if deviation(a, a, [], b, limit=_HALF_A_UNIT, dtype=dtype) is None:
                    continue
                if not noisy:
                    noisy = [
                        self._evaluate(NoisyExactRun(self._before, seed), change, 0)
                        for seed in range(_MORE_SAMPLES)
                    ]
                if deviation(a, a, [n[position] for n in noisy], b, limit=_HALF_A_UNIT, dtype=dtype):
                    return True
        except _CANNOT_RUN:
            pass  # an operator that does not know float64: the comparison in the graph's own types has to do
        return False

    def _has_low_precision(self, change: Change) -> bool:
        """Whether the change computes in low precision, or between values that are held in low precision."""
        nodes = [
            value
            for side, names in enumerate((change.before, change.after))
            for name in names
            if name in self._nodes[side]
            for value in (self._nodes[side][name], *self._nodes[side][name].all_input_nodes)
        ]
        if any(n.op == "get_attr" and _is_floating(value_of(n)) for n in nodes):
            return False  # a constant that the pass computed, in as many digits as it has
        return any(getattr(value_of(n), "dtype", None) in _LOW_PRECISION for n in nodes) or any(
            getattr(v, "dtype", None) in _LOW_PRECISION for v in self._results
        )

    def _dtype(self, name: str, value: Tensor) -> torch.dtype:
        fake = value_of(self._nodes[0][name]) if name in self._nodes[0] else None
        return fake.dtype if isinstance(fake, Tensor) and fake.is_floating_point() else value.dtype

    def _differences(self, change: Change) -> Iterable[Deviation | bool | None]:
        own = self._evaluate(Run(self._before), change, 0)
        got = self._evaluate(Run(self._after), change, 1)
        exact: list[Any] | None = None
        samples: list[list[Any]] = []
        for position, (a, b) in enumerate(zip(own, got, strict=True)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                yield None if _equal(a, b) else True
                continue
            if a.shape != b.shape:
                yield True
                continue
            b = b.to(a.dtype) if b.is_floating_point() == a.is_floating_point() else b
            if b.dtype is not a.dtype or torch.equal(a, b):
                yield None if b.dtype is a.dtype else True
                continue
            if exact is None:
                exact = self._exact(change)
            how: Deviation | None = None
            for count in (_SAMPLES, _MORE_SAMPLES):
                while len(samples) < count:
                    samples.append(self._evaluate(RoundedRun(self._before, len(samples)), change, 0))
                how = deviation(a, exact[position], [s[position] for s in samples[:count]], b)
                if how is None or how.is_clear:
                    break
            yield how

    def _exact(self, change: Change) -> list[Any]:
        try:
            return self._evaluate(ExactRun(self._before), change, 0)
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
            return [None] * len(change.given)

    def _evaluate(self, run: Run, change: Change, side: int, rounded: bool = False) -> list[Any]:
        """The values that the change gives to the rest of the graph.

        Args:
            run: how to run its calls.
            change: the change.
            side: which graph ``run`` runs: 0 before, 1 after.
            rounded: whether its inputs are rounded once more.
        """
        names = (change.before, change.after)[side]
        nodes = self._nodes[side]
        wide = isinstance(run, ExactRun)

        def outside(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return run.run_node(node)
            value = self._values[node.name]
            if isinstance(run, RoundedRun) and rounded and _is_floating(value):
                value = perturbed_by_ulp(value, value_of(node), run.generator)
            return tree_map(as_float64, value) if wide else tree_map(_copied, value)

        with seeded(_SEED):
            for node in run.graph.nodes:
                if node.name not in names:
                    continue
                for value in node.all_input_nodes:
                    if value not in run.env and value.name not in names:
                        run.env[value] = outside(value)
                        if isinstance(run, RoundedRun) and run.reordered != "no":
                            run.sums[value] = parts_behind(value, self._values, self._sums)
                run.env[node] = run.run_node(node)
            wanted = [nodes[pair[side]] for pair in change.given]
            return [run.env[n] if n in run.env else outside(n) for n in wanted]

    def at_the_results(self, change: Change) -> dict[int, Deviation] | None:
        """The deviations of the graph's results because of a change, by position; ``None`` when they cannot be found out.

        A change that rounds nothing, such as none at all, is held to its inputs: they were rounded before, and may be once more.
        """
        try:
            values, wide = (self._evaluate(kind(self._before), change, 0) for kind in (Run, ExactRun))
            own, exact = self._continued(change, values), self._continued(change, wide)
            got = self._continued(change, self._evaluate(Run(self._after), change, 1))
            rounds = not all(_equal(tree_map(as_float64, a), b) for a, b in zip(values, wide, strict=True))
            samples: list[list[Any]] = []
            reordered: list[list[Any]] = []
            stable: list[list[Any]] = []
            found: dict[int, Deviation] = {}
            for position, result in enumerate(self._results):
                if not isinstance(result, Tensor):
                    continue
                if not result.is_floating_point() or got[position].shape != result.shape:
                    if not _equal(own[position], got[position]):
                        return None  # integers: the ordinary comparison decides
                    continue
                for counts in _ROUNDS:
                    for kind, runs in enumerate((samples, reordered, stable)):
                        while len(runs) < counts[kind]:
                            seed = len(runs) + kind * _MORE_SAMPLES
                            run = RoundedRun(self._before, seed, reordered=ORDERS[kind])
                            values = self._evaluate(run, change, 0, rounded=runs is stable or not rounds)
                            runs.append(self._continued(change, values))
                    how = deviation(
                        own[position],
                        exact[position],
                        [s[position] for s in samples],
                        got[position],
                        dtype=result.dtype,
                        reordered=[s[position] for s in reordered],
                        stable=[s[position] for s in stable],
                    )
                    if how is None or (stable and how.is_clear):
                        break
                if how is not None:
                    found[position] = how
            return found or self._exactly_at_the_results(change, exact, samples)
        except _CANNOT_RUN:
            return None

    def _exactly_at_the_results(
        self, change: Change, exact: Sequence[Any], samples: list[list[Any]]
    ) -> dict[int, Deviation]:
        """The deviations of results because a change is another function, beyond its rounding."""
        if not self._differs_exactly(change):
            return {}
        got = self._continued(change, self._evaluate(ExactRun(self._after), change, 1))
        while len(samples) < _MORE_SAMPLES:
            run = RoundedRun(self._before, len(samples))
            samples.append(self._continued(change, self._evaluate(run, change, 0)))
        found: dict[int, Deviation] = {}
        for position, result in enumerate(self._results):
            if not _is_floating(result) or got[position].shape != result.shape:
                continue
            how = deviation(
                exact[position],
                exact[position],
                [s[position] for s in samples],
                got[position],
                limit=_HALF_A_UNIT,
                dtype=torch.float64,
            )
            if how is not None:
                found[position] = how
        return found

    def _continued(self, change: Change, values: Sequence[Any]) -> list[Any]:
        """The results of the graph before with these values instead of those that it has there, in float64."""
        given = {a: value for (a, b), value in zip(change.given, values, strict=True) if a in change.before}
        run = ContinuedRun(self._before, given)
        inputs = cloned(self._inputs)
        results = [tree_map(as_float64, value) for value in (*run(inputs, _SEED), *inputs)]
        by_name = dict(zip(change.given, values, strict=True))
        outputs = zip(graph_outputs(self._before), graph_outputs(self._after), strict=False)
        for position, (a, b) in enumerate(outputs):
            if isinstance(a, fx.Node) and isinstance(b, fx.Node) and (a.name, b.name) in by_name:
                results[position] = tree_map(as_float64, by_name[a.name, b.name])
        return results


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(type(a) is type(b) and a == b)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
