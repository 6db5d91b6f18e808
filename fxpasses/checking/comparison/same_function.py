"""Decide whether a rewritten graph is the same function, window by window in exact arithmetic, or in float64.

A window that is another function is only suspected: later calls may cancel what it does (a bias before a
batch norm), or its inputs may depend on each other. Then what lies between the suspects is judged with them,
and finally the whole graph. Float64 decides where exact arithmetic cannot.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.checking.comparison.computed_constants import explained_by_constants
from fxpasses.checking.comparison.nested_graphs import inner_rewrites
from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.comparison.rounding import Distance, RandomRoundingRun, less_precise, perturbed
from fxpasses.checking.comparison.side_by_side import SideBySide
from fxpasses.checking.comparison.windows import (
    Change,
    Window,
    can_be_cut,
    changed_nodes,
    changes,
    compared_pairs,
    cut,
    join_changes,
    with_users,
)
from fxpasses.checking.execution.interpret import ExactRun, Poison, allocates
from fxpasses.exact import Verdict
from fxpasses.exact.same_values import DRIFT, KERNEL_DRIFT, MASK, SIGN_REASON
from fxpasses.graphs.numbers import became, computable
from fxpasses.regional import region_operators

log = logging.getLogger(__name__)

_MAX_ELEMENTS = 20_000_000
"""Values of a graph to evaluate exactly: each takes 32 bytes, and some twenty times as long as in floats."""
_CLEAR_DIFFERENCE = 1e-3
"""Results this far apart in float64, relative to the largest of their tensor, need no exact check."""
JUMP = 1e-5
"""The smallest difference of another branch, relative to the largest of a tensor.

An activation that switches to another formula is off by less.
"""
_PERTURBATIONS = 2
_MAX_WIDENINGS = 3
"""How often to judge the changes with more of the graph around them, before judging all of it."""
_NOISE, _SMALL = 64.0, 1e-6
"""Results that cancel may differ by this multiple of what an ulp of inputs and calls does to them.

And by this part of the largest number that is computed.
"""
_OWN_PRECISION = 8.0
"""Error, in ulps, that an operator that does not run in float64 may have."""
Relation = Literal["same", "unproved", "other"]


@dataclass(frozen=True)
class Difference:
    """Evidence that a graph is another function.

    Attributes:
        position: of the result, -1 if unknown.
        problem: in words: element, both values, on which inputs.
        calls: names of the calls that make the difference, if known.
    """

    position: int
    problem: str
    calls: frozenset[str] = frozenset()


class Rewriting:
    """A graph, what a pass made of it, and inputs.

    Args:
        before: the graph before.
        after: the graph after.
        changed: names of the changed nodes of each.
        inputs: the inputs to compare them on.
        samples: how many random samples of the inputs to compare as well.
        signed_zeros: whether 0.0 and -0.0 are different values.
        known: what is known of windows of this graph on these inputs; updated.
        values: returns the values of the graph before, by name.
        chosen: whether the inputs were chosen for what they lose.
    """

    def __init__(
        self,
        before: fx.GraphModule,
        after: fx.GraphModule,
        changed: tuple[set[str], set[str]],
        inputs: Sequence[Any],
        samples: int,
        signed_zeros: bool,
        known: dict[Hashable, Relation],
        values: Callable[[], dict[str, Any]],
        chosen: bool = False,
    ) -> None:
        self._chosen = chosen
        self.before, self.after, self.changed, self.inputs = before, after, changed, inputs
        self._samples, self._signed_zeros = samples, signed_zeros
        self._known, self._values = known, values

    @functools.cached_property
    def windows(self) -> list[Window] | None:
        """The changes, cut out as windows; ``None`` if they cannot be."""
        if not can_be_cut(self.before, self.after, self.changed):
            return None
        taken = compared_pairs(self.before, self.after, self.changed)
        found = [change for change in changes(self.before, self.after, self.changed) if change.outputs]
        if taken is None or not {pair for change in found for pair in change.outputs}.issuperset(taken):
            return None
        windows = [self._cut(change) for change in found]
        return None if None in windows else windows  # type: ignore[return-value]

    def with_inputs(self, inputs: Sequence[Any]) -> Rewriting:
        """The same graphs on other inputs. What is known of windows remains that of the current ones."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    @property
    def values(self) -> dict[str, Any]:
        """The values of the graph before, by name."""
        return self._values()

    def _cut(self, change: Change) -> Window | None:
        return cut(self.before, self.after, change, self.values)

    @functools.cached_property
    def suspects(self) -> list[Window]:
        """The windows whose sides are different functions of their inputs."""
        return [window for window in self.windows or () if self.relation(window) == "other"]

    @functools.cached_property
    def joined(self) -> Window | None:
        """The suspects with all calls between them, or their users too, if that is the same function."""
        several = [window.change for window in self.suspects]
        for _ in range(_MAX_WIDENINGS if several else 0):
            change = join_changes(self.before, self.after, several)
            joined = self._cut(change)
            if joined is None or self.relation(joined) != "other":
                return joined
            several = [with_users(self.before, self.after, change)]
        return None

    def relation(self, window: Window) -> Relation:
        """Relate the two sides of a window as functions of its inputs."""
        if window.key is None:
            return self._compute_relation(window)
        key = window.key, self._signed_zeros
        if key not in self._known:
            kind = window.kind, self._signed_zeros  # a repeated layer is proved once
            self._known[key] = self._known.get(kind) or self._compute_relation(window)
            if self._known[key] == "same":
                self._known[kind] = "same"
        return self._known[key]

    def less_precise(self, part: Window | Rewriting) -> dict[int, Distance]:
        """Results that lose precision in a part: see :func:`fxpasses.checking.comparison.rounding.less_precise`."""
        return less_precise(part.before, part.after, part.inputs, chosen=self._chosen)

    def equal_values(self, window: Window) -> dict[str, str]:
        """Map nodes of a window's second side to nodes of the first with equal values; {} if undecidable."""
        if not self._can_compare(window.before, window.after, window.inputs):
            return {}
        given = [v.cpu() if isinstance(v, Tensor) else v for v in window.inputs]
        try:
            return SideBySide(window.before, given).equivalent(window.after, samples=1, example=False).adopted
        except ValueError:
            return {}

    def _compute_relation(self, window: Window) -> Relation:
        # Random samples prove. The inputs may hold what these do not: numbers that are compared and equal.
        is_off = bool(differences_in_float64(window.before, window.after, window.inputs, JUMP))
        verdict = self._exact_verdict(window.before, window.after, window.inputs, example=is_off)
        if verdict is not None and verdict.kind != "UNPROVED":
            if verdict.kind == "EQUAL":
                return "same"
            explained = self.is_explained_by_constants(window.before, window.after, window.inputs)
            return "same" if explained else "other"
        if verdict is not None:
            log.debug("not proved: %s", verdict)
        found = differences_in_float64(window.before, window.after, window.inputs)
        return "unproved" if found is not None and not found else "other"

    def _differs_only_where_nonfinite(self, verdict: Verdict) -> bool:
        finding = verdict.finding
        return (
            not self._signed_zeros
            and finding is not None
            and finding.comparison.relation == "where not finite"
        )

    def _exact_verdict(
        self, before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any], example: bool = True
    ) -> Verdict | None:
        """The exact verdict; ``None`` if there is none."""
        if not self._can_compare(before, after, inputs):
            return None
        try:
            original = SideBySide(before, [v.cpu() if isinstance(v, Tensor) else v for v in inputs])
            verdict = original.equivalent(
                after, samples=self._samples, signed_zeros=self._signed_zeros, example=example
            )
        except ValueError as error:
            log.debug("there is no exact verdict: %s", error)
            return None
        if verdict.kind == "EQUAL" and allocates(after):
            return (
                None  # zeros stand for uninitialized memory: float64 has to decide whether something reads it
            )
        # For made-up values: random samples have shown that it is the same function elsewhere.
        is_another_formula = verdict.kind == "APPROXIMATE" and (verdict.distance or 0.0) <= JUMP
        return Verdict() if is_another_formula and not self._samples else verdict

    def _can_compare(self, before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether to compare two graphs in exact arithmetic at all."""
        is_quantized = any(isinstance(value, Tensor) and value.is_quantized for value in inputs)
        return not (_changes_allocations(before, after) or is_quantized or self._is_large(before, inputs))

    def _is_large(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        held = [self.values.get(node.name) for node in gm.graph.nodes if node.op == "call_function"]
        return sum(v.numel() for v in (*held, *inputs) if isinstance(v, Tensor)) > _MAX_ELEMENTS

    def differences(self) -> list[Difference] | None:
        """Evidence that the graph after is another function; ``None`` if a graph does not run in float64."""
        if not any(self.changed):
            return []
        hidden = self._differences_in_untaken_branches()
        if hidden:
            return hidden
        if self.windows is not None and not self.suspects:
            return []
        clear = differences_in_float64(self.before, self.after, self.inputs, _CLEAR_DIFFERENCE)
        if clear and not self.is_explained_by_constants(self.before, self.after, self.inputs):
            return [_with_calls(difference, self._first_wrong_calls()) for difference in clear]
        return [] if self.joined is not None else self._whole_graph_differences()

    def _differences_in_untaken_branches(self) -> list[Difference]:
        """Differences in nested graphs that these inputs do not reach."""
        found = []
        for inner in inner_rewrites(self.before, self.after, self.inputs):
            if inner.called:
                continue
            verdict = self._exact_verdict(inner.before, inner.after, inner.inputs)
            if verdict is not None and verdict.kind != "UNPROVED":
                said = "" if verdict.kind == "EQUAL" else str(verdict.finding)
            else:
                said = "; ".join(
                    d.problem for d in differences_in_float64(inner.before, inner.after, inner.inputs) or ()
                )
            if said:
                problem = f"the branch {inner.name}, which these inputs do not take: {said}"
                found.append(Difference(-1, problem, frozenset({inner.caller})))
        return found

    def _first_wrong_calls(self) -> frozenset[str]:
        """The calls of the first window that clearly differs, or else of the first that differs."""
        for min_difference in (_CLEAR_DIFFERENCE, JUMP):
            for window in self.suspects:
                if differences_in_float64(window.before, window.after, window.inputs, min_difference):
                    return window.change.names
        return self.suspects[0].change.names if self.suspects else frozenset()

    def is_explained_by_constants(
        self, before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]
    ) -> bool:
        """Whether rounded constants of the second graph explain a difference. Args: both graphs, inputs."""

        def is_same(first: fx.GraphModule, second: fx.GraphModule) -> bool:
            verdict = self._exact_verdict(first, second, inputs)
            return verdict is not None and verdict.kind == "EQUAL"

        return explained_by_constants(before, after, inputs, is_same)

    def _whole_graph_differences(self) -> list[Difference] | None:
        verdict = self._exact_verdict(self.before, self.after, self.inputs)
        calls = self.suspects[0].change.names if self.windows is not None and self.suspects else frozenset()
        if verdict is not None and verdict.kind == "EQUAL":
            return []
        found = differences_in_float64(self.before, self.after, self.inputs)
        if verdict is None or verdict.kind == "UNPROVED" or self._differs_only_where_nonfinite(verdict):
            return found if found is None else [_with_calls(d, calls) for d in found]
        finding = verdict.finding
        assert finding is not None
        if finding.comparison.reason == SIGN_REASON and found == []:  # not even a sign: it cancels in float64
            return []
        position = _position(self.before, finding.output)
        if position in tie_dependent_outputs(self.before, self.inputs, self.after):
            return found
        if finding.node:
            calls = next(
                (w.change.names for w in self.suspects if finding.node in w.change.names),
                calls or frozenset({finding.node}),
            )
        if self.is_explained_by_constants(self.before, self.after, self.inputs):
            return []
        problem = (
            str(finding).partition(", ")[2].replace(", on example inputs", "")
        )  # all differences name the inputs
        if verdict.kind == "APPROXIMATE":
            problem += f"; an approximation, at most {verdict.distance:.2g} of the largest value away"
        return [Difference(position, problem, calls)]


def _changes_allocations(before: fx.GraphModule, after: fx.GraphModule) -> bool:
    """Whether a changed call makes uninitialized memory."""
    pairs = zip((before, after), changed_nodes(before, after), strict=True)
    return any(allocates(gm, names) for gm, names in pairs)


def _with_calls(difference: Difference, calls: frozenset[str]) -> Difference:
    return Difference(difference.position, difference.problem, calls)


def _position(gm: fx.GraphModule, output: str) -> int:
    """The position of a result: outputs first, then inputs."""
    kind, _, rest = output.partition(" ")
    if kind == "output":
        return int(rest)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    (returned,) = gm.graph.find_nodes(op="output")
    count = len(returned.args[0]) if isinstance(returned.args[0], (list, tuple)) else 1
    name = rest.removesuffix(" after the run")
    return count + names.index(name) if kind == "input" and name in names else -1


def differences_in_float64(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Any],
    min_difference: float = DRIFT,
    numbers_only: bool = False,
) -> list[Difference] | None:
    """Return the results that differ in float64 by more than its rounding; ``None`` if a graph cannot run.

    Args:
        before: a graph.
        after: what a pass made of it.
        inputs: of both.
        min_difference: the smallest relative difference that counts.
        numbers_only: whether to ignore numbers that become non-finite.
    """
    run = ExactRun(before)
    mine = run.results(inputs)
    huge = ExactRun(before, "huge").results(inputs) if allocates(before) else None
    poisons: tuple[Poison, ...] = ("nan", "huge") if allocates(after) else ("nan",)
    drift = max(min_difference, DRIFT if is_native(before) and is_native(after) else KERNEL_DRIFT)
    for poison in poisons:
        other = ExactRun(after, poison)
        theirs = other.results(inputs)
        drift = max(drift, _OWN_PRECISION * max(run.max_relative_error, other.max_relative_error))
        if mine is None or theirs is None or len(mine) != len(theirs):
            return None
        size = max((1.0, *(_largest(v) for v in (*mine, *inputs))))
        scale = 1e-4 * min(size, 1e3)
        found = []
        nearby: list[list[Any]] = []
        rewritten: list[list[Any]] = []
        computed = 0.0
        tie_dependent: set[int] | None = None
        for leaf, (position, a, b) in enumerate(_leaves(mine, theirs)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
                if isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
                    found.append(Difference(position, f"{a} became {b}"))
                continue
            other_run = None if huge is None else huge[position]
            undefined = torch.isnan(a) & ~torch.isnan(other_run) if isinstance(other_run, Tensor) else None
            wrong = _wrong_elements(a, b, drift, scale)
            if numbers_only and b.is_floating_point():
                wrong &= b.isfinite()
            if undefined is not None:
                wrong &= ~undefined
            if wrong.any() and tie_dependent is None:
                tie_dependent = tie_dependent_outputs(before, inputs, after)
            if tie_dependent and position in tie_dependent:
                continue
            if wrong.any() and min_difference <= _CLEAR_DIFFERENCE:
                if not nearby:
                    nearby, computed = _perturbed_results(before, inputs, mine)
                    rewritten, _ = _perturbed_results(after, inputs, theirs)
                noise = max(_noise(a, nearby, leaf), _noise(b, rewritten, leaf))
                wrong &= ~_is_noise(a, b, noise, max(size, computed))
            if wrong.any():
                at = tuple(
                    int(i) for i in torch.unravel_index(wrong.flatten().long().argmax().cpu(), a.shape)
                )
                where = f"element {list(at)}: " if at else ""
                found.append(Difference(position, f"{where}{became(a[at].item(), b[at].item())}, in float64"))
        if found:
            return found
    return []


class _MaxTrackingRun(RandomRoundingRun):
    """A run that records the largest number that it computes."""

    largest = 0.0

    def _evaluate(self, n: fx.Node) -> Any:
        result = super()._evaluate(n)
        self.largest = max(self.largest, *map(_largest, tree_leaves(result)), 0.0)
        return result


def _perturbed_results(
    gm: fx.GraphModule, inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[list[list[Any]], float]:
    """Results with inputs and calls perturbed by one float64 ulp, tuples included, and the largest number."""
    runs = [_MaxTrackingRun(gm, seed, torch.float64) for seed in range(_PERTURBATIONS)]
    found = [run.results(perturbed(inputs, seed, torch.float64)) for seed, run in enumerate(runs)]
    leaves = [[b for _, _, b in _leaves(results, run)] for run in found if run is not None]
    return leaves, max(run.largest for run in runs)


def _noise(value: Tensor, nearby: Sequence[Sequence[Any]], leaf: int) -> float:
    """How much one ulp of inputs and calls changes a result.

    For the whole tensor, as differences are measured: an element may be zero by chance, or by a saturated
    softmax.
    """
    if value.is_complex() or not value.is_floating_point():
        return 0.0
    held = computable(value)
    runs = [
        computable(run[leaf])
        for run in nearby
        if isinstance(run[leaf], Tensor) and run[leaf].shape == value.shape
    ]
    return float(
        sum(((run - held).abs().nan_to_num(0.0, 0.0, 0.0) for run in runs), torch.zeros_like(held)).max()
    )


def _is_noise(a: Tensor, b: Tensor, noise: float, size: float) -> Tensor:
    """Where the difference is what float64 leaves of terms that cancel: what one ulp does to either graph.

    A fused kernel may round what cancels where the graph before has exact zeros, and the other way round.
    """
    if a.is_complex() or not a.is_floating_point():
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    apart = (computable(a) - computable(b)).abs()
    return (apart <= _NOISE * noise) & (apart <= _SMALL * size)


def _leaves(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    """Yield pairs of results with their positions; each result of operators with several."""
    for position, pair in enumerate(zip(mine, theirs, strict=True)):
        several = [value if isinstance(value, (list, tuple)) else [value] for value in pair]
        if len(several[0]) == len(several[1]):
            yield from ((position, a, b) for a, b in zip(*several, strict=True))
        else:
            yield position, len(several[0]), len(several[1])


def is_native(gm: fx.GraphModule) -> bool:
    """Whether all operators, in regions too, are PyTorch's own, which do not round to less than float64."""
    return all(
        getattr(node.target, "namespace", "aten") in ("aten", "prims", "_c10d_functional")
        or region_operators.is_native(node)
        for node in gm.graph.nodes
        if node.op == "call_function"
    )


def _largest(value: Any) -> float:
    if (
        not isinstance(value, Tensor)
        or not value.numel()
        or not (value.is_floating_point() or value.is_complex())
    ):
        return 0.0
    return float(computable(value).abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def _wrong_elements(a: Tensor, b: Tensor, drift: float, scale: float) -> Tensor:
    a, b = computable(a), computable(b)
    if a.is_complex():
        a, b = (torch.view_as_real(value.resolve_conj()) for value in (a, b))
        return _wrong_elements(a, b, drift, scale).any(-1)
    if not a.is_floating_point():
        return a != b
    both = a.isfinite() & b.isfinite()
    is_mask = (a.abs() >= MASK) & (a == b)
    size = max(_largest(torch.where(both & ~is_mask, a, 0.0)), scale)
    wrong = both & ((a - b).abs() > drift * size)
    # Non-finite values may become finite, and infinity NaN. Bitwise passes are checked in their own dtypes.
    return wrong | (a.isfinite() & ~b.isfinite())
