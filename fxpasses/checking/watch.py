"""The value check of a compilation: remembers what each pass did, and compares when the compiled function first runs.

While compiling there are no values. So the graphs before and after each rewrite are kept, and compared on the inputs of
the first calls, before the compiled graph sees them: on the inputs as they are, with random gradients of the
outputs (and ones, and zeros), and where sizes are symbolic on made-up inputs of other sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses._torch import outside_tracing
from fxpasses.checking.blame import describe, first_difference, guilty_sites, rewritten_places
from fxpasses.checking.inputs import (
    Unsupported,
    bindings,
    cloned,
    from_hints,
    other_sizes,
    placeholders,
    resized,
    tangents,
)
from fxpasses.checking.limits import progress
from fxpasses.checking.pair import joined
from fxpasses.checking.repro import make_repro
from fxpasses.checking.values import Mismatch, Reference, compare, is_tangent, value_names
from fxpasses.contract import Check, GraphKind, Pass
from fxpasses.errors import Location, PassError, StageError, StructureError, ValueMismatchError
from fxpasses.rewriting import copy_graph
from fxpasses.sites import MatchSite

__all__ = ["Rewrite", "ValueCheck"]

log = logging.getLogger(__name__)

_CALLS = 2
"""How many calls of a graph are checked in any case; after them, only calls with new sizes are."""
_MOST_CALLS = 8
_SWEEP_SECONDS = 5.0
"""How long one rewrite is tried on made-up inputs of other sizes."""


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
    def bitwise(self) -> bool:
        """Whether the pass promises the same bits."""
        return _numerics(self.item) == "bitwise"


class ValueCheck(Check):
    """Compares the graphs before and after each pass by value, on the inputs of the first calls.

    One object serves one Dynamo graph.

    Args:
        directory: where repro files go.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rewrites: dict[str, list[Rewrite]] = {}
        self._joint: fx.GraphModule | None = None
        self._latest: Rewrite | None = None

    def before(self, item: Pass, gm: fx.GraphModule, kind: GraphKind) -> fx.GraphModule:
        copy = copy_graph(gm)
        self._latest = Rewrite(item, kind, copy, copy)
        return copy

    def after(
        self, item: Pass, gm: fx.GraphModule, kind: GraphKind, remembered: Any, sites: tuple[MatchSite, ...]
    ) -> None:
        if _numerics(item) != "none":
            self._rewrites.setdefault(kind, []).append(Rewrite(item, kind, remembered, copy_graph(gm), sites))

    def to_be_partitioned(self, joint: fx.GraphModule) -> None:
        """Remember the joint graph that the partition is given."""
        self._joint = copy_graph(joint)

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Remember the pair that the partition made: it is compared with the joint graph as a pair."""
        if self._joint is None:
            return
        pair = joined(self._joint, copy_graph(forward), copy_graph(backward))
        if pair is None:
            log.debug("the partition is not checked by value: it hands random states over")
            return
        self._rewrites.setdefault("joint", []).append(Rewrite(None, "joint", self._joint, pair))

    def watch(
        self, kind: str, compiled: Callable[..., Any], instead: Callable[[StageError, Any], Any] | None
    ) -> Callable[..., Any]:
        """``compiled``, with its first calls checked before they run.

        Args:
            kind: the kind of graph that was compiled.
            compiled: what it was compiled to; takes one list of inputs.
            instead: called with the error and the graph before the wrong pass; returns what to run, or raises.
        """
        looker = _FirstCalls(self, ("joint", "forward") if kind == "forward" else (kind,))
        running = compiled

        def run(inputs: list[Any]) -> Any:
            nonlocal running
            try:
                looker.look(inputs)
            except ValueMismatchError as error:
                if instead is None:
                    raise
                running = instead(error, looker.before_error)
            if getattr(running, "_boxed_call", False):
                return running(inputs)
            return running(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def rewrites(self, kind: str) -> list[Rewrite]:
        """What was changed in graphs of one kind, in order."""
        return self._rewrites.get(kind, [])

    def examine(
        self, rewrite: Rewrite, inputs: Sequence[Any], where: str, traced: Sequence[Any] | None
    ) -> None:
        """Compare one rewrite on one set of inputs.

        Args:
            rewrite: what to look at.
            inputs: what to run the graphs on.
            where: a description of the inputs.
            traced: the inputs of this call, when ``inputs`` have other sizes.

        Raises:
            ValueMismatchError: when it is wrong.
            Unsupported: when the graph before cannot be run on the inputs.
        """
        names = value_names(rewrite.before, rewrite.kind)
        found = compare(Reference(rewrite.before, inputs), rewrite.after, names, rewrite.bitwise)
        if found:
            raise self._blame(rewrite, list(inputs), found, where, traced)

    def _blame(
        self,
        rewrite: Rewrite,
        inputs: list[Any],
        found: list[Mismatch],
        where: str,
        traced: Sequence[Any] | None,
    ) -> ValueMismatchError:
        item = rewrite.item
        location = first_difference(rewrite.before, rewrite.after, inputs)
        how = f"{describe(found)}, on {where}"
        if item is None:
            return ValueMismatchError(
                how, location, pass_name="partition", graph=rewrite.kind, mismatches=found
            )
        sites = guilty_sites(item, rewrite.before, rewrite.kind, rewrite.sites, inputs, rewrite.bitwise)
        place = ""
        if sites:
            place = f"{len(sites)} of {len(rewrite.sites)} match sites: " + "; ".join(map(str, sites))
            location = sites[0].location if len(sites) == 1 else location
        else:
            place = _place(rewrite, location)
        error = ValueMismatchError(
            how,
            location,
            pass_name=item.name,
            graph=rewrite.kind,
            mismatches=found,
            sites=sites,
            place=place,
        )
        suspects = {location.node, *(site.location.node for site in sites)}
        self._write_repro(error, rewrite, rewrite.after, inputs, traced, suspects, found[0].fault)
        return error

    def explain(self, error: PassError) -> None:
        """Add a repro file to the error of a pass that raised, or left a graph that is not well formed."""
        if self._latest is None or self._latest.item is None or self._latest.item.name != error.pass_name:
            return
        fault = "structure" if isinstance(error, StructureError) else "error"
        try:
            with outside_tracing():
                inputs = from_hints(placeholders(self._latest.before))
                Reference(self._latest.before, inputs).native  # noqa: B018  (it has to run)
        except Unsupported as reason:
            log.info("there is no repro file: %s", reason)
            return
        with outside_tracing():
            self._write_repro(error, self._latest, None, inputs, None, {error.location.node}, fault)

    def _write_repro(
        self,
        error: PassError,
        rewrite: Rewrite,
        after: fx.GraphModule | None,
        inputs: list[Any],
        traced: Sequence[Any] | None,
        suspects: set[str],
        fault: str,
    ) -> None:
        assert rewrite.item is not None
        headline = f"Pass {rewrite.item.name!r} is wrong on a {rewrite.kind} graph: {error.reason}."
        try:
            file, calls, why = make_repro(
                rewrite.item,
                rewrite.before,
                after,
                inputs,
                traced,
                suspects,
                fault,
                rewrite.bitwise,
                self._directory,
                headline,
            )
        except OSError as failure:
            file, calls, why = None, 0, f"the file cannot be written: {failure}"
        if file is None:
            log.warning("there is no repro file for pass %r: %s", rewrite.item.name, why)
            return
        progress.note("repro", str(file))
        error.add_repro(str(file), calls)


class _FirstCalls:
    """Decides which calls of one compiled graph are looked at, and on which inputs."""

    def __init__(self, check: ValueCheck, kinds: Sequence[str]) -> None:
        self._check, self._kinds = check, kinds
        self._seen: list[tuple[int, ...]] = []
        self.before_error: fx.GraphModule | None = None

    def look(self, args: Sequence[Any]) -> None:
        """Check this call, if it is one of the first, or one of the first of its sizes.

        Raises:
            ValueMismatchError: when a pass was wrong.
        """
        rewrites = [rewrite for kind in self._kinds for rewrite in self._check.rewrites(kind)]
        sizes = tuple(n for a in args if isinstance(a, torch.Tensor) for n in a.shape)
        if (
            not rewrites
            or len(self._seen) >= _MOST_CALLS
            or (len(self._seen) >= _CALLS and sizes in self._seen)
        ):
            return
        first = not self._seen
        self._seen.append(sizes)
        for rewrite in rewrites:
            self.before_error = rewrite.before
            try:
                for inputs, where, traced in self._inputs(rewrite, args, first):
                    self._check.examine(rewrite, inputs, where, traced)
            except Unsupported as reason:
                name = rewrite.item.name if rewrite.item else "partition"
                log.debug("%s on %s is not checked by value: %s", name, rewrite.kind, reason)

    def _inputs(
        self, rewrite: Rewrite, args: Sequence[Any], first: bool
    ) -> Iterator[tuple[list[Any], str, list[Any] | None]]:
        """Sets of inputs for one rewrite, each with a description; made-up ones with those that they were made from."""
        nodes = placeholders(rewrite.before)
        gradients = [n for n in nodes if is_tangent(n)]
        generator = torch.Generator().manual_seed(len(self._seen))
        given = list(args) if rewrite.kind == "backward" else list(args[: len(nodes) - len(gradients)])
        bound = bindings(nodes, given)

        def with_gradients(values: list[Any], sizes: Any, kind: str) -> list[Any]:
            new = iter(tangents(gradients, sizes, kind, generator))
            others = iter(v for n, v in zip(nodes, values, strict=False) if not is_tangent(n))
            return [next(new) if is_tangent(n) else next(others) for n in nodes]

        if rewrite.kind == "backward":
            yield cloned(given), "the inputs of this call", None
        kinds = ("random", "ones", "zero") if first else ("random",)
        for kind in kinds if gradients else kinds[:1]:
            label = f" with {kind} output gradients" if gradients else ""
            yield with_gradients(cloned(given), bound, kind), f"the inputs of this call{label}", None
        if not first or rewrite.item is None:
            return
        until = time.perf_counter() + _SWEEP_SECONDS
        for sizes in other_sizes(nodes, bound):
            if time.perf_counter() > until:
                return
            try:
                values = with_gradients(
                    resized(nodes[: len(given)], given, sizes, generator), sizes, "random"
                )
                Reference(rewrite.before, values).native  # noqa: B018  (made-up inputs that do not fit are left out)
            except Unsupported:
                continue
            label = "made-up inputs with " + ", ".join(f"{k}={v}" for k, v in sizes.items())
            yield values, label, with_gradients(cloned(given), bound, "random")


def _numerics(item: Pass | None) -> str:
    """What the pass's contract says about values: ``bitwise``, ``tolerance`` or ``none``."""
    return item.contract.numerics if item is not None else "tolerance"


def _place(rewrite: Rewrite, location: Location) -> str:
    """Which of the places that changed holds the node to blame, for a pass that claims no sites."""
    groups = rewritten_places(rewrite.before, rewrite.after)
    for number, group in enumerate(groups):
        if location.node in group:
            return f"place {number + 1} of {len(groups)} that changed ({len(group)} nodes)"
    return ""
