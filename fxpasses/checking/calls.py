"""The calls of a compiled graph that are checked by value, and the inputs that they are checked on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxpasses._torch import disable_current_modes
from fxpasses.checking.inputs import (
    Unsupported,
    cloned,
    other_sizes,
    placeholders,
    resized_inputs,
    symbol_bindings,
    tangents,
)
from fxpasses.checking.values import Reference, is_tangent
from fxpasses.checking.variants import variants
from fxpasses.pass_manager.contract import GraphKind, Pass
from fxpasses.pass_manager.sites import MatchSite

__all__ = ["Examiner", "FirstCalls", "Rewrite", "Trial"]

_CALLS = 2
"""Number of first calls of a graph that are checked; after them, only calls with new sizes are."""
_MOST_CALLS = 8
_SWEEP_SECONDS = 5.0
"""Seconds for which one rewrite is tried on made-up inputs of other sizes."""
_looking = threading.local()
"""Whether a graph is being looked at in this thread: what it calls meanwhile (regions, say) is not."""


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
        """Whether the pass promises the same bits."""
        return self.numerics == "bitwise"

    @property
    def name(self) -> str:
        """Who made it."""
        return self.item.name if self.item is not None else "partition"


@dataclass(frozen=True)
class Trial:
    """Inputs to try a rewrite on.

    Attributes:
        reference: the graph before, on these inputs.
        where: what they are, in words.
        real: whether they are those of a call, but for gradients of outputs.
        traced: inputs of the sizes of this call, when the trial's have other ones.
    """

    reference: Reference
    where: str
    real: bool = False
    traced: list[Any] | None = None


class Examiner(Protocol):
    """Who is shown each rewrite on each set of inputs."""

    def rewrites(self, kind: str) -> list[Rewrite]:
        """The rewrites of graphs of one kind."""

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        """Compare one rewrite on one set of inputs."""

    def has_time(self, rewrite: Rewrite) -> bool:
        """Whether to go on with made-up inputs."""

    def cannot_examine(self, rewrite: Rewrite, why: str) -> None:
        """The graph before cannot be run on any inputs."""


class FirstCalls:
    """Has the rewrites behind one compiled graph examined on the inputs of its first calls, and on others.

    Args:
        check: what examines them.
        kinds: which graphs' rewrites belong to the compiled graph.

    Attributes:
        before_error: the graph before the rewrite that was looked at last.
    """

    def __init__(self, check: Examiner, kinds: Sequence[str]) -> None:
        self._check, self._kinds = check, kinds
        self._seen: list[tuple[int, ...]] = []
        self._told: set[str] = set()
        self.before_error: fx.GraphModule | None = None

    def look(self, args: Sequence[Any]) -> None:
        """Check this call, if it is one of the first, or one of the first of its sizes.

        Raises:
            ValueMismatchError: when a pass was wrong.
        """
        if getattr(_looking, "now", False):
            return
        rewrites = [rewrite for kind in self._kinds for rewrite in self._check.rewrites(kind)]
        sizes = tuple(n for a in args if isinstance(a, Tensor) for n in a.shape)
        if (
            not rewrites
            or len(self._seen) >= _MOST_CALLS
            or (len(self._seen) >= _CALLS and sizes in self._seen)
        ):
            return
        first = not self._seen
        self._seen.append(sizes)
        _looking.now = True
        try:
            # On a first call AOTAutograd watches each operator for aliases; what the check runs is not the program's.
            with disable_current_modes():
                self._look_at(rewrites, args, first)
        finally:
            _looking.now = False

    def _look_at(self, rewrites: Sequence[Rewrite], args: Sequence[Any], first: bool) -> None:
        for rewrite in rewrites:
            self.before_error = rewrite.before
            try:
                for trial in self._trials(rewrite, args, first):
                    if not trial.real and not self._check.has_time(rewrite):
                        break
                    self._check.examine(rewrite, trial)
            except Unsupported as reason:
                if rewrite.name not in self._told:
                    self._check.cannot_examine(rewrite, str(reason))
                self._told.add(rewrite.name)

    def _trials(self, rewrite: Rewrite, args: Sequence[Any], first: bool) -> Iterator[Trial]:
        nodes = placeholders(rewrite.before)
        gradients = [n for n in nodes if is_tangent(n)]
        generator = torch.Generator().manual_seed(len(self._seen))
        backward = rewrite.kind == "backward"
        given = list(args) if backward else list(args[: len(nodes) - len(gradients)])
        bound = symbol_bindings(nodes, given)

        def with_gradients(values: list[Any], sizes: Any, kind: str = "random") -> list[Any]:
            new = iter(tangents(gradients, sizes, kind, generator))
            others = iter(v for n, v in zip(nodes, values, strict=False) if not is_tangent(n))
            return [next(new) if is_tangent(n) else next(others) for n in nodes]

        def real(values: list[Any], label: str = "") -> Trial:
            return Trial(Reference(rewrite.before, values), f"the inputs of this call{label}", real=True)

        if backward:
            yield real(given)
        kinds = ("random", "ones", "zero") if first else ("random",)
        for kind in kinds if gradients else kinds[:1]:
            label = f" with {kind} output gradients" if gradients else ""
            yield real(with_gradients(given, bound, kind), label)
        if not first or rewrite.item is None:
            return
        for variant in variants(rewrite.before, given, rewrite.bitwise, generator):
            spare = variant.spare
            for values in variant.choices:
                reference = Reference(rewrite.before, with_gradients(values, bound))
                if _runs(reference, finite=variant.spare > 0 or not (rewrite.bitwise or variant.broken)):
                    if not spare:
                        yield Trial(reference, f"made-up inputs of these sizes: {variant.label}")
                        break
                    spare -= 1
        yield from self._sweep(rewrite, given, bound, generator, with_gradients)

    def _sweep(
        self,
        rewrite: Rewrite,
        given: list[Any],
        bound: Any,
        generator: torch.Generator,
        with_gradients: Callable[..., list[Any]],
    ) -> Iterator[Trial]:
        """Made-up inputs of other sizes."""
        nodes = placeholders(rewrite.before)
        until = time.perf_counter() + _SWEEP_SECONDS
        for sizes in other_sizes(nodes, bound):
            if time.perf_counter() > until:
                return
            try:
                values = with_gradients(resized_inputs(nodes[: len(given)], given, sizes, generator), sizes)
                reference = Reference(rewrite.before, values)
                reference.native  # noqa: B018  (made-up inputs that do not fit are left out)
            except Unsupported:
                continue
            label = "made-up inputs with " + ", ".join(
                f"{k}={v}" for k, v in sizes.items() if v != bound.get(k)
            )
            yield Trial(reference, label, traced=with_gradients(cloned(given), bound))


def _runs(reference: Reference, finite: bool) -> bool:
    """Whether the graph can be run on made-up values, and gives finite results where that is asked for."""
    try:
        results = reference.native.values
    except Unsupported:
        return False
    if not finite:
        return True
    floating = (v for v in results if isinstance(v, Tensor) and v.is_floating_point())
    return all(bool(v.isfinite().all()) for v in floating)
