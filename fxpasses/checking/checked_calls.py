"""The calls of a compiled graph that are checked by value, and the inputs to check them on."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxpasses._torch import disable_current_modes
from fxpasses.checking.comparison.carried import CarriedValues, Step
from fxpasses.checking.comparison.nan_guards import has_finite_tests, has_masks
from fxpasses.checking.comparison.same_function import Relation
from fxpasses.checking.comparison.values import (
    Mismatch,
    Outcome,
    Reference,
    compare,
    is_tangent,
    loses,
    value_names,
)
from fxpasses.checking.critical.critical_inputs import critical_integers, critical_rows, critical_sizes
from fxpasses.checking.critical.critical_values import at_critical_values
from fxpasses.checking.critical.given_values import Counterexample
from fxpasses.checking.critical.masked_rows import with_masked_rows
from fxpasses.checking.critical.overflow import OVERFLOW_FRACTION, largest_power, stays_finite
from fxpasses.checking.execution.collectives import mark_parameters
from fxpasses.checking.execution.inputs import (
    Unsupported,
    cloned,
    count_elements,
    in_memory,
    made_up,
    make_tangents,
    other_sizes,
    placeholders,
    resized_inputs,
    scaled,
    symbol_bindings,
)
from fxpasses.exact.bounds import inputs_at_bounds, inputs_with_rare_values
from fxpasses.exact.samples import EDGES, Family, sort_inputs
from fxpasses.graphs.threads import few_threads
from fxpasses.pass_manager.pass_base import GraphKind, Pass
from fxpasses.pass_manager.sites import MatchSite

_CALLS = 2
"""Number of first calls of a graph that are checked. Later ones are checked only if they have new sizes."""
_MAX_CALLS = 8
_SWEEP_SECONDS, _MAX_ELEMENTS = 5.0, 50_000_000
"""How many seconds to try the rewrites of a graph on made-up inputs of other sizes.

And how many values the graph may hold at these.
"""
_RANDOM_SAMPLES = 2
"""Random samples in exact arithmetic, on which the error bound rests."""
_POWER = 5
"""Power of two to scale values up by, if results stay finite: beyond the limits of a clamp."""
_NONFINITE_FAMILIES: tuple[Family, ...] = ("infinity", "not a number")
_DRAWS = 3
"""How often such values are drawn for a graph with masks, each of which hides some of them."""
_SMALL = -12
"""Power of two at which differences of numbers near one have lost half of their digits."""
_MAX_SCALED_INPUTS, _SCALED_POWER = 4, 7
"""How many inputs are scaled up one by one, and by which power of two."""
_SMALL_INTS = (torch.int8, torch.uint8, torch.int16)
_checking = threading.local()
"""Whether this thread is checking a graph. Graphs that it calls meanwhile (regions) are not checked."""


@dataclass(frozen=True)
class Rewrite:
    """One change of one graph.

    Attributes:
        item: the pass; ``None`` for the partition.
        kind: the kind of graph.
        before: the graph before, a copy.
        after: the graph after, a copy.
        sites: what the pass claimed.
    """

    item: Pass | None
    kind: GraphKind
    before: fx.GraphModule
    after: fx.GraphModule
    sites: tuple[MatchSite, ...] = ()

    @property
    def numerics(self) -> str:
        """``numerics`` of the pass's contract: ``bitwise``, ``tolerance`` or ``none``."""
        return self.item.contract.numerics if self.item is not None else "tolerance"

    @property
    def bitwise(self) -> bool:
        """Whether the pass promises to preserve all bits."""
        return self.numerics == "bitwise"

    @property
    def name(self) -> str:
        """The pass's name, or ``partition``."""
        return self.item.name if self.item is not None else "partition"


@dataclass(frozen=True)
class Trial:
    """Inputs to try a rewrite on.

    Attributes:
        reference: the graph before, on these inputs.
        where: what they are, in words.
        real: whether they are those of a call, except for gradients of outputs.
        traced: inputs with the sizes of this call, if the trial has other sizes.
        known: the wrong results, if already known.
    """

    reference: Reference
    where: str
    real: bool = False
    traced: list[Any] | None = None
    known: list[Mismatch] | None = None

    def mismatches(self, rewrite: Rewrite) -> list[Mismatch]:
        """Return the results that a rewrite makes wrong."""
        names = value_names(rewrite.before, rewrite.kind)
        return self.known or compare(self.reference, rewrite.after, names, rewrite.bitwise)


class Examiner(Protocol):
    """Receives each rewrite on each set of inputs."""

    def rewrites(self, kind: str) -> list[Rewrite]:
        """Return the rewrites of graphs of one kind."""

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        """Compare one rewrite on one set of inputs."""

    def has_time(self, rewrite: Rewrite) -> bool:
        """Whether to try inputs other than those of the first call."""

    def cannot_examine(self, rewrite: Rewrite, why: str) -> None:
        """Called if the graph before cannot run on any inputs."""


class FirstCalls:
    """Has the rewrites of one compiled graph examined on the inputs of its first calls, and on others.

    Args:
        check: examines them.
        kinds: the kinds of graphs whose rewrites belong to the compiled graph.

    Attributes:
        before_error: the graph before the rewrite that was examined last.
    """

    def __init__(self, check: Examiner, kinds: Sequence[str]) -> None:
        self._check, self._kinds = check, kinds
        self._seen: list[tuple[int, ...]] = []
        self._reported: set[str] = set()
        self.before_error: fx.GraphModule | None = None

    def check_call(self, args: Sequence[Any]) -> bool:
        """Check this call if it is one of the first, or one of the first with its sizes.

        Returns:
            Whether it was checked.

        Raises:
            ValueMismatchError: a pass is wrong.
        """
        if getattr(_checking, "now", False):
            return False
        rewrites = [rewrite for kind in self._kinds for rewrite in self._check.rewrites(kind)]
        sizes = tuple(n for a in args if isinstance(a, Tensor) for n in a.shape)
        if (
            not rewrites
            or len(self._seen) >= _MAX_CALLS
            or (len(self._seen) >= _CALLS and sizes in self._seen)
        ):
            return False
        first = not self._seen
        self._seen.append(sizes)
        _checking.now = True
        try:
            # On a first call AOTAutograd watches operators for aliases. Those that the check runs do not
            # concern it.
            with disable_current_modes(), few_threads(*(rewrite.before for rewrite in rewrites)):
                self._check_rewrites(rewrites, args, first)
        finally:
            _checking.now = False
        return True

    def _check_rewrites(self, rewrites: Sequence[Rewrite], args: Sequence[Any], first: bool) -> None:
        for kind in dict.fromkeys(rewrite.kind for rewrite in rewrites):
            mine = [rewrite for rewrite in rewrites if rewrite.kind == kind]
            for gm in (gm for rewrite in mine for gm in (rewrite.before, rewrite.after)):
                mark_parameters(gm, args)
            self.before_error = mine[0].before
            try:
                inputs = _CallInputs(mine[0], args, len(self._seen))
                label, *others = inputs.real(first)
            except Unsupported as reason:
                for rewrite in mine:
                    self._report_unchecked(rewrite, reason)
                continue
            checked: list[Rewrite] = []
            steps: list[Step] = []
            last: Reference | None = None
            compared: list[tuple[Rewrite, Step, dict[Hashable, Relation]]] = []
            for rewrite in mine:
                step = Step(rewrite.before, rewrite.after, rewrite.bitwise, steps[-1] if steps else None)
                native = last.compared if last is not None and step.follows else None
                last = self._examine_call(rewrite, step, *label, first, native)
                if last is not None:
                    checked.append(rewrite)
                    steps.append(step)
                    if first and rewrite.item is not None and last.is_compared:
                        compared.append((rewrite, step, last.windows))
            if not first:
                continue
            for values, where in others:
                self._examine(checked, steps, values, f"the inputs of this call{where}", real=True)
            timely = [rewrite for rewrite in checked if self._check.has_time(rewrite)]
            for values, where, chosen in inputs.made_up if timely else ():
                self._examine(
                    checked, steps, values, f"made-up inputs of these sizes: {where}", chosen=chosen
                )
            for rewrite, step in zip(checked, steps, strict=True):
                self._examine_targeted_inputs(rewrite, step, inputs.real(first)[0][0])
            for rewrite, step, known in compared:
                # Recompute values: keeping those of all rewrites would take too much memory.
                reference = Reference(rewrite.before, label[0], _RANDOM_SAMPLES, changed=step.changed)
                reference.windows = known
                rewriting = reference.rewriting(rewrite.after, rewrite.bitwise)
                has_time = functools.partial(self._check.has_time, rewrite)
                for found in at_critical_values(rewriting, has_time):
                    self._examine_counterexample(rewrite, found)
            self._sweep_sizes(checked, steps, inputs)

    def _report_unchecked(self, rewrite: Rewrite, reason: Unsupported) -> None:
        if rewrite.name not in self._reported:
            self._check.cannot_examine(rewrite, str(reason))
        self._reported.add(rewrite.name)

    def _examine_call(
        self, rewrite: Rewrite, step: Step, values: list[Any], where: str, first: bool, native: Outcome | None
    ) -> Reference | None:
        """Examine a rewrite on the inputs of this call; ``None`` if that is not possible.

        Args:
            rewrite: the rewrite.
            step: what it changed.
            values: inputs.
            where: what they are, in words.
            first: whether it is the first call.
            native: the outcome of the graph before, if known.
        """
        self.before_error = rewrite.before
        try:
            samples = _RANDOM_SAMPLES if first else 0
            reference = Reference(rewrite.before, values, samples, native=native, changed=step.changed)
            self._check.examine(rewrite, Trial(reference, f"the inputs of this call{where}", real=True))
        except Unsupported as reason:
            self._report_unchecked(rewrite, reason)
            return None
        return reference

    def _examine(
        self,
        rewrites: Sequence[Rewrite],
        steps: Sequence[Step],
        values: list[Any],
        where: str,
        real: bool = False,
        traced: Callable[[], list[Any]] | None = None,
        chosen: bool = False,
    ) -> None:
        """Examine all rewrites of graphs of one kind on other inputs, if the graphs before accept them."""
        carried = CarriedValues(values)
        for rewrite, step in zip(rewrites, steps, strict=True):
            # The partition does not depend on values: it only hands them over.
            if (rewrite.item is None and not real) or not self._check.has_time(rewrite):
                continue
            self.before_error = rewrite.before
            try:
                if carried.agrees(step):
                    continue
                # Other sizes also compare shapes and strides, which takes whole graphs.
                kept = carried.before if traced is None else None
                reference = Reference(rewrite.before, values, 0, kept, chosen=chosen, changed=step.changed)
                trial = Trial(reference, where, real, traced() if traced is not None else None)
                self._check.examine(rewrite, trial)
            except Unsupported:
                return

    def _examine_targeted_inputs(self, rewrite: Rewrite, step: Step, values: list[Any]) -> None:
        """Examine one rewrite on inputs made for it."""
        if rewrite.item is None:
            return
        generator = torch.Generator().manual_seed(len(self._seen))
        reference = Reference(rewrite.before, values, samples=0, changed=step.changed)
        rewriting = reference.rewriting(rewrite.after)
        for inputs in critical_rows(rewriting, generator):
            self._examine(
                [rewrite], [step], inputs, "made-up inputs of these sizes: rows that a pass changed"
            )
        for inputs in critical_integers(rewriting, generator):
            self._examine(
                [rewrite], [step], inputs, "made-up inputs of these sizes: integers that the graph holds"
            )

    def _examine_counterexample(self, rewrite: Rewrite, found: Counterexample) -> None:
        rewrite = dataclasses.replace(rewrite, before=found.before, after=found.after)
        names = value_names(rewrite.before, rewrite.kind)
        known = [
            Mismatch("value", names[d.position], d.position, d.problem, d.calls) for d in found.differences
        ]
        reference = Reference(found.before, found.inputs, samples=0, chosen=True)
        known = known or loses(reference, found.after, names)
        if known:
            self._check.examine(rewrite, Trial(reference, found.where, known=known))

    def _sweep_sizes(self, rewrites: Sequence[Rewrite], steps: Sequence[Step], inputs: _CallInputs) -> None:
        """Try made-up inputs of other sizes."""
        if not rewrites:
            return
        deadline = time.thread_time() + _SWEEP_SECONDS
        first = (
            [size for one in rewrites for size in critical_sizes(one.before, one.after)]
            if inputs.bound
            else []
        )
        for sizes in other_sizes(placeholders(rewrites[0].before), inputs.bound, first):
            if time.thread_time() > deadline:
                return
            if count_elements(rewrites[0].before, sizes) > _MAX_ELEMENTS:
                continue
            try:
                values = inputs.with_sizes(sizes)
            except Unsupported:
                continue
            label = ", ".join(f"{k}={v}" for k, v in sizes.items() if v != inputs.bound.get(k))
            where = f"made-up inputs with {label}"
            self._examine(rewrites, steps, values, where, traced=inputs.traced)
            for one, step in (
                zip(rewrites, steps, strict=True) if first and set(sizes.values()) & set(first) else ()
            ):
                reference = Reference(one.before, values, samples=0, changed=step.changed)
                if not _runs_on_inputs(reference):  # for example positions beyond a table
                    continue
                rewriting = reference.rewriting(one.after)
                for made in critical_integers(rewriting, torch.Generator().manual_seed(len(self._seen))):
                    self._examine(
                        [one],
                        [step],
                        made,
                        f"{where}, and integers that the graph holds",
                        traced=inputs.traced,
                    )


def _runs_on_inputs(reference: Reference) -> bool:
    try:
        return reference.native is not None
    except Unsupported:
        return False


class _CallInputs:
    """Inputs for the graphs of one kind, made from those of one call.

    Args:
        rewrite: the first graph's.
        args: the inputs of the call.
        seed: for made-up inputs.

    Attributes:
        bound: the value of each symbol.
    """

    def __init__(self, rewrite: Rewrite, args: Sequence[Any], seed: int) -> None:
        self._gm = rewrite.before
        self._nodes = placeholders(rewrite.before)
        self._gradients = [n for n in self._nodes if is_tangent(n)]
        self._is_backward = rewrite.kind == "backward"
        count = len(self._nodes) - (0 if self._is_backward else len(self._gradients))
        self._given = list(args)[:count]
        self._generator = torch.Generator().manual_seed(seed)
        self.bound = symbol_bindings(self._nodes, self._given)
        self._real: list[tuple[list[Any], str]] = []

    def real(self, every_kind: bool) -> list[tuple[list[Any], str]]:
        """Return the inputs of the call with gradients of outputs, and a description of those.

        Args:
            every_kind: whether to also try gradients that are ones and zeros.
        """
        if not self._real:
            if self._is_backward:
                self._real.append((self._given, ""))
            kinds = ("random", "ones", "zero") if every_kind else ("random",)
            for kind in kinds if self._gradients else kinds[:1]:
                label = f" with {kind} output gradients" if self._gradients else ""
                self._real.append((self._with_gradients(self._given, self.bound, kind), label))
        return self._real

    @functools.cached_property
    def made_up(self) -> list[tuple[list[Any], str, bool]]:
        """Inputs that tend to break rewrites, their description, and whether their magnitude was chosen."""
        values = self._with_gradients(self._given, self.bound)
        families: tuple[Family, ...] = (
            "random",
            *EDGES,
            *_NONFINITE_FAMILIES * (_DRAWS if has_masks(self._gm) else 1),
        )  # a mask may hide non-finite values
        found = []
        for family in families:
            if family == "index bounds":
                ends = inputs_at_bounds(self._gm, values) if all(map(_is_on_cpu, values)) else ()
                found += [(made, "integers at the ends of what the graph takes") for made in ends]
            else:
                found.append((made_up(values, family, self._generator), family))
            if family == "infinity" and has_finite_tests(self._gm):
                found.append((_negative_infinities(found[-1][0]), "minus infinity"))
            if family == "extreme integers":
                found += _with_opposite_extremes(found[-1][0])
        usual = found[0][0]  # random ones
        found += inputs_with_rare_values(self._gm, usual) if all(map(_is_on_cpu, values)) else ()
        masked = with_masked_rows(self._gm, usual, self._generator)
        found += [] if masked is None else [(masked, "masked scores")]
        unscaled_count = len(found)
        is_finite = lambda power: stays_finite(self._gm, scaled(usual, 2.0**power), inside=True)  # noqa: E731
        largest = int(OVERFLOW_FRACTION * largest_power(is_finite))
        for power in dict.fromkeys([min(_POWER, largest), largest, _SMALL]):
            found.append((scaled(usual, 2.0**power), f"random, times 2**{power}"))
        # Next to a row of negative numbers, a number that stands for minus infinity is large.
        signs = next(values for values, family in found if family == "signs")
        found.append((scaled(signs, 2.0**largest), f"signs, times 2**{largest}"))
        found += [*self._with_one_extreme_input(usual), *self._with_constant_rows(usual)]
        return [
            (sort_inputs(self._gm, made), where, at >= unscaled_count)
            for at, (made, where) in enumerate(found)
        ]

    def _with_one_extreme_input(self, usual: list[Any]) -> Iterator[tuple[list[Any], str]]:
        """Zeros or large values in one input: in all, a pole or overflow of one hides what another shows."""
        floats = [
            i
            for i, (n, v) in enumerate(zip(self._nodes, usual, strict=True))
            if isinstance(v, Tensor) and v.is_floating_point() and not is_tangent(n)
        ]
        if not 1 < len(floats) <= _MAX_SCALED_INPUTS:
            return
        zeros = made_up(usual, "zeros", self._generator)
        large = scaled(usual, 2.0**_SCALED_POWER)
        for at in floats:
            for made, what in ((zeros, "zeros"), (large, f"random, times 2**{_SCALED_POWER},")):
                values = [*usual[:at], made[at], *usual[at + 1 :]]
                if made is zeros or stays_finite(self._gm, values, inside=True):
                    yield values, f"{what} in {self._nodes[at].name}"

    def _with_constant_rows(self, usual: list[Any]) -> Iterator[tuple[list[Any], str]]:
        """Constant and zero rows in all but parameters: these hide what happens at zeros of the data."""
        parameters = [isinstance(v, torch.nn.Parameter) for v in self._given]
        parameters += [True] * (len(usual) - len(parameters))  # gradients of outputs
        if any(parameters[: len(self._given)]) and not all(parameters):
            pairs = zip(usual, made_up(usual, "rows", self._generator), parameters, strict=True)
            yield [value if is_kept else row for value, row, is_kept in pairs], "rows in what is no parameter"

    def with_sizes(self, sizes: Mapping[Any, int]) -> list[Any]:
        """Make up inputs of other sizes. Raises: Unsupported: there are none."""
        given = resized_inputs(self._nodes[: len(self._given)], self._given, sizes, self._generator)
        return sort_inputs(self._gm, self._with_gradients(given, sizes))

    def traced(self) -> list[Any]:
        """Return inputs with the sizes of this call."""
        return self._with_gradients(cloned(self._given), self.bound)

    def _with_gradients(self, values: list[Any], sizes: Any, kind: str = "random") -> list[Any]:
        new = iter(make_tangents(self._gradients, sizes, kind, self._generator))
        others = iter(v for n, v in zip(self._nodes, values, strict=False) if not is_tangent(n))
        return [next(new) if is_tangent(n) else next(others) for n in self._nodes]


def _with_opposite_extremes(values: list[Any]) -> list[tuple[list[Any], str]]:
    """Flip every other integer tensor, if there are several: one is low where another is high."""
    integers = [
        i for i, v in enumerate(values) if isinstance(v, Tensor) and v.dtype in _SMALL_INTS and v.dim()
    ]
    flipped = cloned(values)
    for i in integers[1::2]:
        in_memory(flipped[i]).copy_(in_memory(values[i]).flip(0))
    return [(flipped, "extreme integers, low where others are high")] if len(integers) > 1 else []


def _negative_infinities(values: list[Any]) -> list[Any]:
    """Replace infinity by minus infinity."""
    return [
        v.masked_fill(v == math.inf, -math.inf) if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in values
    ]


def _is_on_cpu(value: Any) -> bool:
    """Whether a bad index raises: on other devices it makes the device unusable for the process."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"
