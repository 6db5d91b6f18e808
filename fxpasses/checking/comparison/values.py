"""Compare two graphs by running them on the same inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fake.error_text import describe_error
from fxpasses.checking.comparison.nan_guards import answers, had_guards
from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.comparison.overlapping_results import overlapping
from fxpasses.checking.comparison.rounding import (
    Distance,
    distance,
    largest_error,
    other_sign,
    perturbed,
    same_bits,
)
from fxpasses.checking.comparison.same_function import Relation, Rewriting, differences_in_float64
from fxpasses.checking.comparison.unreachable import unreachable
from fxpasses.checking.comparison.windows import Window, changed_values
from fxpasses.checking.execution.fused_kernels import has_kernels
from fxpasses.checking.execution.inputs import Unsupported, cloned, describe_input, is_tangent, placeholders
from fxpasses.checking.execution.interpret import DefinedRun, ExactRun, Poison, Run, allocates
from fxpasses.graphs.numbers import became, computable

aten = torch.ops.aten

_SEED = 20
_PERTURBATIONS = 2
_END = 1 / 2
"""Fraction of the largest number of a dtype: values beyond it may overflow if added in another order."""
Fault = Literal["value", "metadata", "aliasing", "structure", "error"]


@dataclass(frozen=True)
class Mismatch:
    """One way in which a graph differs from its reference.

    Attributes:
        fault: a wrong value, wrong metadata, wrong sharing of memory, a structure fault, or an exception.
        value: which of the graph's results, in words.
        position: its position among the results (outputs, then inputs after the run); -1 for an exception.
        problem: what is wrong, in words.
        calls: for a wrong value, names of the calls that make it wrong, if known.
        rounds: whether the function is the same and only precision is lost.
    """

    fault: Fault
    value: str
    position: int
    problem: str
    calls: frozenset[str] = frozenset()
    rounds: bool = False

    def __str__(self) -> str:
        return f"{self.value}: {self.problem}" if self.value else self.problem


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of a graph.

    Attributes:
        values: its outputs, then its inputs after the run.
        shared: pairs of positions in ``values`` whose memory overlaps.
    """

    values: list[Any]
    shared: frozenset[tuple[int, int]]


class Reference:
    """A graph to compare others with, on fixed inputs. It runs in each precision on first use.

    Args:
        gm: the graph.
        inputs: its inputs; they are copied for each run.
        samples: how many random samples of them to check in exact arithmetic as well.
        node_values: the values of all nodes on these inputs, by name, if known. Then changes are judged in windows
            only, as far as possible.
        native: the graph's own results, if known.
        chosen: whether the inputs were chosen for what they lose: see :func:`~.rounding.less_precise`.
        changed: what :func:`~.windows.changed_values` says of the compared graph, if known.

    Raises:
        Unsupported: the inputs cannot be copied.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        samples: int = 2,
        node_values: dict[str, Any] | None = None,
        native: Outcome | None = None,
        chosen: bool = False,
        changed: tuple[set[str], set[str]] | None = None,
    ) -> None:
        self.gm = gm
        self.chosen, self._changed = chosen, changed
        self.inputs = cloned(inputs)
        self.samples = samples
        self.windows: dict[Hashable, Relation] = {}
        """What is known of windows of the graph on these inputs."""
        self.is_compared = False
        """Whether the whole graph was compared with another one."""
        self.compared: Outcome | None = None
        """The outcome of the graph compared last."""
        self.unreachable: list[str] = []
        """Differences of windows that no inputs of the graph reach: see :func:`~.unreachable.unreachable`."""
        self.has_values = node_values is not None
        if node_values is not None:
            self.node_values = node_values
        if native is not None:
            self.native = native

    def errors_of(self, after: fx.GraphModule) -> tuple[float, float]:
        """The largest error of another graph against float64, and as a multiple of this graph's rounding."""
        error = times = 0.0
        got = Reference(after, self.inputs).native.values
        for position, (native, value) in enumerate(zip(self.native.values, got, strict=True)):
            if not isinstance(native, Tensor):
                continue
            exact = self.exact[position]
            error = max(error, largest_error(native if exact is None else exact, value))
            how = self.distance(position, value)
            times = max(times, how.times if how is not None else 0.0)
        return error, times

    def rewriting(self, after: fx.GraphModule, bitwise: bool = False) -> Rewriting:
        """How another graph differs from this one. Args: those of :func:`compare`."""
        changed = changed_values(self.gm, after) if self._changed is None else self._changed
        known, values = self.windows, lambda: self.node_values
        return Rewriting(
            self.gm, after, changed, self.inputs, self.samples, bitwise, known, values, self.chosen
        )

    @functools.cached_property
    def native(self) -> Outcome:
        """The graph's own results.

        Raises:
            Unsupported: the graph cannot run on these inputs.
        """
        try:
            return _run(self.gm, self.inputs)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"the graph itself raises {describe_error(error)}") from error

    @functools.cached_property
    def exact(self) -> list[Any]:
        """The results in float64; all ``None`` if an operator cannot run."""
        return self._in_float64(self.inputs)

    @functools.cached_property
    def nearby(self) -> list[list[Any]]:
        """The same for inputs that are perturbed by half a unit in the last place."""
        return [self._in_float64(perturbed(self.inputs, seed)) for seed in range(_PERTURBATIONS)]

    def _in_float64(self, inputs: Sequence[Any]) -> list[Any]:
        return ExactRun(self.gm).results(inputs) or [None] * len(self.native.values)

    def distance(self, position: int, result: Tensor) -> Distance | None:
        """Measure the error of another graph's result: see :func:`fxpasses.checking.comparison.rounding.distance`."""
        wide = [run[position] for run in (self.exact, *self.nearby) if run[position] is not None]
        return distance(self.native.values[position], result, wide)

    @functools.cached_property
    def node_values(self) -> dict[str, Any]:
        """The values of all nodes, by name."""
        run = Run(self.gm, keep=True)
        run(cloned(self.inputs), _SEED)
        return run.values


def compare(
    reference: Reference, candidate: fx.GraphModule, names: Sequence[str], bitwise: bool = False
) -> list[Mismatch]:
    """Return the mismatches of ``candidate`` with ``reference`` on its inputs; empty if there are none.

    If an input holds NaN or infinity and bits need not match, the candidate may lose these but not add any.
    Of the rest, only what follows a call that tests for finite numbers is compared.

    Args:
        reference: the graph before, with inputs.
        candidate: the graph after.
        names: of the results, for messages: see :func:`value_names`.
        bitwise: whether values must match bit for bit.

    Raises:
        Unsupported: the reference cannot run on the inputs.
    """
    rewriting = reference.rewriting(candidate, bitwise)
    if reference.has_values and not bitwise and not has_nan_or_inf(reference.inputs):
        judged = _in_windows(rewriting)
        if judged is not None:
            return judged
    expected = reference.native
    same, got = True, expected
    for poison in ("nan", "huge") if allocates(candidate) else ("nan",):
        tried = _run_rewritten(candidate, reference.inputs, poison)
        if isinstance(tried, Mismatch):
            return [tried]
        got = tried
        found = _metadata_mismatches(expected, got, names)
        if len(expected.values) == len(got.values):
            found += _aliasing_mismatches(expected, got, names)
        if bitwise and not any(m.fault == "metadata" for m in found):
            found += _bit_mismatches(reference, got, names)
        if found:
            return found
        same &= _are_same(expected, got, bitwise)
    # Uninitialized memory had other contents than in the run of a reference.
    reference.compared = None if allocates(candidate) else got
    reference.is_compared = True
    if same and not reference.samples:
        return []
    lost = [] if bitwise else _lost_infinities(reference, candidate, got, names, rewriting.changed[0])
    if lost:
        return lost
    if not bitwise and has_nan_or_inf(reference.inputs):
        found = _other_answers(reference, candidate, got, names, answers(reference.gm, rewriting.changed[0]))
        if found or not had_guards(reference.gm, candidate, rewriting.changed[0]):
            return found  # products with zero and larger sums may spread them
        return _confirmed(reference, candidate, _nonfinite_mismatches(reference, candidate, got, names))
    differences = rewriting.differences()
    if differences is None:
        raise Unsupported("the graph does not run in float64")
    if differences:
        return [
            Mismatch(
                "value", names[d.position] if d.position >= 0 else "", d.position, d.problem, calls=d.calls
            )
            for d in differences
        ]
    if rewriting.suspects:
        reference.unreachable = unreachable(rewriting, ("random",))
    if bitwise or same:
        return []
    return _nonfinite_mismatches(reference, candidate, got, names) or precision_losses(rewriting, names)


def _are_same(expected: Outcome, got: Outcome, signs: bool) -> bool:
    pairs = zip(expected.values, got.values, strict=True)
    return all(same_bits(a, b, signs) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _in_windows(rewriting: Rewriting) -> list[Mismatch] | None:
    """What windows show; ``None`` if only whole graphs can tell: a new function, or values not finite."""
    if rewriting.windows is None or rewriting.suspects:
        return None
    found = []
    for window in rewriting.windows:
        for at, how in rewriting.less_precise(window).items():
            if math.isinf(how.times):
                return None  # later calls may mask it
            found.append(_window_mismatch(window, at, how))
    return found


def loses(reference: Reference, candidate: fx.GraphModule, names: Sequence[str]) -> list[Mismatch]:
    """Return where a rewritten graph, which is the same function, becomes non-finite or loses precision.

    Args:
        reference: the graph before, with inputs.
        candidate: the graph after.
        names: of the results.
    """
    got = _run_rewritten(candidate, reference.inputs)
    if isinstance(got, Mismatch):
        return [got]
    broken = _nonfinite_mismatches(reference, candidate, got, names)
    return broken or precision_losses(reference.rewriting(candidate), names)


def precision_losses(rewriting: Rewriting, names: Sequence[str]) -> list[Mismatch]:
    """Where a rewritten graph, which is the same function, loses precision: in windows, or else in results.

    Args:
        rewriting: the graphs, and inputs.
        names: of the results.
    """
    if rewriting.windows is None or rewriting.suspects:
        found = rewriting.less_precise(rewriting).items()
        return [
            Mismatch("value", names[at], at, f"LESS PRECISE: {how}", rounds=True)
            for at, how in found
            if math.isfinite(how.times)
        ]
    return [
        _window_mismatch(window, at, how)
        for window in rewriting.windows
        for at, how in rewriting.less_precise(window).items()
        if math.isfinite(how.times)
    ]


def has_nan_or_inf(values: Sequence[Any]) -> bool:
    """Whether any value is NaN or plus infinity; masks hold minus infinity."""
    return any(
        isinstance(v, Tensor) and v.is_floating_point() and bool((v.isnan() | computable(v).isposinf()).any())
        for v in values
    )


def _window_mismatch(window: Window, at: int, how: Distance) -> Mismatch:
    given = f"value of {window.change.outputs[at][0]}"
    return Mismatch("value", given, -1, f"LESS PRECISE: {how}", window.change.names, rounds=True)


def value_names(gm: fx.GraphModule, kind: str) -> list[str]:
    """Name each output of the graph, and each input after the run."""
    inputs = placeholders(gm)
    (output,) = gm.graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    names = [f"output {i}" for i in range(len(returned))]
    primals = [n for n in inputs if not is_tangent(n) and "is_cut" not in n.meta]
    if kind == "joint" and len(primals) < len(returned):
        count = len(returned) - len(primals)
        names[count:] = [f"gradient of {describe_input(node)}" for node in primals]
    elif kind == "backward":
        names = [f"gradient {i}" for i in range(len(returned))]
    return names + [f"input {describe_input(node)} after the run" for node in inputs]


def _run(gm: fx.GraphModule, inputs: Sequence[Any], poison: Poison = "nan") -> Outcome:
    copies = cloned(inputs)
    values = [*Run(gm, poison)(copies, _SEED), *copies]
    return Outcome(values, overlapping(values, len(values) - len(copies)))


def _run_rewritten(gm: fx.GraphModule, inputs: Sequence[Any], poison: Poison = "nan") -> Outcome | Mismatch:
    """Run a graph that a pass made. If it raises, that is the finding.

    Raises:
        Unsupported: the graph cannot run, which says nothing about it.
    """
    try:
        return _run(gm, inputs, poison)
    except Unsupported:
        raise
    except Exception as error:  # noqa: BLE001  (whatever a wrong graph raises is the finding)
        return Mismatch("error", "", -1, f"the graph now raises {describe_error(error)}")


def _metadata_mismatches(expected: Outcome, got: Outcome, names: Sequence[str]) -> list[Mismatch]:
    if len(expected.values) != len(got.values):
        return [Mismatch("metadata", "", -1, f"{len(expected.values)} results became {len(got.values)}")]
    found = []
    for position, (a, b) in enumerate(zip(expected.values, got.values, strict=True)):
        was, now = _describe(a), _describe(b)
        if was != now:
            found.append(Mismatch("metadata", names[position], position, f"was {was} and is {now}"))
    return found


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
    text = f"{value.dtype}{tuple(value.shape)} on {value.device}"
    if value.layout is torch.strided and value.numel():
        # The stride of a dimension of size 1 is meaningless.
        text += (
            f" with strides {tuple(s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1)}"
        )
    return text


def _aliasing_mismatches(expected: Outcome, got: Outcome, names: Sequence[str]) -> list[Mismatch]:
    def pair(a: int, b: int) -> str:
        return f"{names[a]} and {names[b].removesuffix(' after the run')}"

    new = [
        Mismatch("aliasing", pair(a, b), a, "share memory and did not")
        for a, b in got.shared - expected.shared
    ]
    lost = [
        Mismatch("aliasing", pair(a, b), a, "shared memory and do not any more")
        for a, b in expected.shared - got.shared
        if not names[a].startswith("gradient")  # nothing relies on gradients being views of each other
    ]
    return sorted([*new, *lost], key=lambda m: m.position)


def _bit_mismatches(reference: Reference, got: Outcome, names: Sequence[str]) -> list[Mismatch]:
    """The results whose bits differ."""
    found = []
    huge = _run(reference.gm, reference.inputs, "huge") if allocates(reference.gm) else None
    for position, (native, value) in enumerate(zip(reference.native.values, got.values, strict=True)):
        if not isinstance(native, Tensor) or same_bits(native, value, signs=True):
            continue
        wrong = ~_same_elements(native, value) | other_sign(native, value)
        if huge is not None:  # what the reference leaves undefined may differ
            wrong &= _same_elements(native, huge.values[position])
        if wrong.any():
            found.append(Mismatch("value", names[position], position, _first_wrong(native, value, wrong)))
    return found


def _same_elements(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def _first_wrong(a: Tensor, b: Tensor, wrong: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(wrong.flatten().long().argmax().cpu(), a.shape))
    return f"element {list(at)}: {became(a[at].item(), b[at].item())}, {int(wrong.sum())} differ"


def _nonfinite_mismatches(
    reference: Reference, candidate: fx.GraphModule, got: Outcome, names: Sequence[str]
) -> list[Mismatch]:
    """Results that are NaN or infinite where the reference is finite, unless fused kernels explain it."""
    found = []
    values, kernels = got.values, has_kernels(candidate)
    if kernels and any(isinstance(v, Tensor) and not computable(v).isfinite().all() for v in values):
        copies = cloned(reference.inputs)
        values = [*DefinedRun(candidate)(copies, _SEED), *copies]
    for position, (native, value) in enumerate(zip(reference.native.values, values, strict=True)):
        if isinstance(native, Tensor) and (native.is_floating_point() or native.is_complex()):
            size = computable(native).abs()
            broken = (size <= _END * torch.finfo(native.dtype).max) & ~computable(value).isfinite()
            if broken.any():
                found.append(
                    Mismatch("value", names[position], position, _first_wrong(native, value, broken))
                )
    return found


def _other_answers(
    reference: Reference,
    candidate: fx.GraphModule,
    got: Outcome,
    names: Sequence[str],
    positions: Sequence[int],
) -> list[Mismatch]:
    """Results at these positions that differ from finite ones in their own dtypes and in float64."""

    def differs(position: int) -> bool:
        native, value = reference.native.values[position], got.values[position]
        both = isinstance(native, Tensor) and isinstance(value, Tensor)
        return both and bool(((native != value) & computable(native).isfinite()).any())

    wrong = list(filter(differs, positions))
    found = differences_in_float64(reference.gm, candidate, reference.inputs) if wrong else ()
    return [
        Mismatch("value", names[d.position], d.position, d.problem, d.calls)
        for d in found or ()
        if d.position in wrong
    ]


def _lost_infinities(
    reference: Reference,
    candidate: fx.GraphModule,
    got: Outcome,
    names: Sequence[str],
    changed: Collection[str],
) -> list[Mismatch]:
    """Results that infinite inputs no longer make infinite, nor in float64, after a changed infinity test."""
    if all(not isinstance(v, Tensor) or bool(computable(v).isfinite().all()) for v in reference.inputs):
        return []
    positions = answers(reference.gm, changed, infinite=True)
    wide = ExactRun(candidate).results(reference.inputs) if positions else None
    found = []
    for position in positions if wide is not None else ():
        native, value = reference.native.values[position], got.values[position]
        exact, other = reference.exact[position], wide[position]  # type: ignore[index]
        if isinstance(native, Tensor) and native.is_floating_point() and isinstance(exact, Tensor):
            wrong = computable(native).isinf() & (native == exact) & (value != native) & (other != exact)
            if wrong.any():
                found.append(Mismatch("value", names[position], position, _first_wrong(native, value, wrong)))
    return found


def _confirmed(reference: Reference, candidate: fx.GraphModule, found: list[Mismatch]) -> list[Mismatch]:
    """Keep what float64 confirms and no open order explains: kernels multiply infinity by padding zeros."""
    wide = ExactRun(candidate).results(reference.inputs) if found else None
    if wide is None or any(value is None for value in reference.exact):
        return found
    tie_dependent = tie_dependent_outputs(reference.gm, reference.inputs, candidate)
    return [
        m
        for m in found
        if m.position not in tie_dependent
        and bool((reference.exact[m.position].isfinite() & ~wide[m.position].isfinite()).any())
    ]
