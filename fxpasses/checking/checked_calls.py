"""The calls of a compiled graph that are checked by value, and the inputs to check them on."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxpasses._torch import disable_current_modes
from fxpasses.checking.call_inputs import CallInputs
from fxpasses.checking.comparison.carried import CarriedValues, Step
from fxpasses.checking.comparison.same_function import Relation
from fxpasses.checking.comparison.values import Mismatch, Outcome, Reference, compare, loses, value_names
from fxpasses.checking.critical.critical_inputs import critical_integers, critical_rows, critical_sizes
from fxpasses.checking.critical.critical_values import at_critical_values
from fxpasses.checking.critical.given_values import Counterexample
from fxpasses.checking.execution.collectives import mark_parameters
from fxpasses.checking.execution.inputs import Unsupported, count_elements, other_sizes, placeholders
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
                inputs = CallInputs(mine[0].before, mine[0].kind, args, len(self._seen))
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

    def _sweep_sizes(self, rewrites: Sequence[Rewrite], steps: Sequence[Step], inputs: CallInputs) -> None:
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
