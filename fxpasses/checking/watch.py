"""The value check of a compilation: record each pass, and compare when the compiled function first runs.

There are no values at compile time. So the graphs before and after each rewrite are kept, and compared on the
inputs of the first calls, before the compiled graph gets them (:mod:`fxpasses.checking.checked_calls` decides
on which inputs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from fxpasses._torch import outside_tracing
from fxpasses.checking.checked_calls import FirstCalls, Rewrite, Trial
from fxpasses.checking.comparison.nested_graphs import inner_rewrites
from fxpasses.checking.comparison.values import Mismatch, Reference
from fxpasses.checking.comparison.windows import changed_nodes, changes
from fxpasses.checking.execution.inputs import Unsupported, inputs_from_hints, placeholders
from fxpasses.checking.faults.blame import (
    describe_mismatches,
    first_difference,
    guilty_sites,
    locate_suspect,
    partners,
)
from fxpasses.checking.faults.repro import make_repro
from fxpasses.checking.stages.joint_graph import joined_graph
from fxpasses.checking.stages.staged import stage_repro
from fxpasses.compiling.observing import RewriteCheck
from fxpasses.errors import Location, PassError, StageError, StructureError, ValueMismatchError
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.pass_manager.limits import progress
from fxpasses.pass_manager.pass_base import GraphKind, Pass
from fxpasses.pass_manager.sites import MatchSite

log = logging.getLogger(__name__)

_MOST_NAMED = 3
"""An error names at most this many match sites; all are in its ``sites``."""


class ValueCheck(RewriteCheck):
    """Compares the graphs before and after each pass by value, on the inputs of the first calls.

    One object serves one Dynamo graph.

    Args:
        directory: where repro files are written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rewrites: dict[str, list[Rewrite]] = {}
        self._joint: fx.GraphModule | None = None
        self._latest: Rewrite | None = None
        self._verdicts: dict[tuple[str, str], str] = {}

    def before(self, item: Pass, gm: fx.GraphModule, kind: GraphKind) -> fx.GraphModule:
        """Keep a copy of the graph. Args: those of :meth:`fxpasses.pass_manager.pass_base.Check.before`."""
        copy = copy_graph(gm, constants=True, like=self._latest.after if self._latest else None)
        self._latest = Rewrite(item, kind, copy, copy)
        return copy

    def after(
        self, item: Pass, gm: fx.GraphModule, kind: GraphKind, remembered: Any, sites: tuple[MatchSite, ...]
    ) -> None:
        """Keep the rewrite for the first calls. Args: those of :meth:`fxpasses.pass_manager.pass_base.Check.after`."""
        if item.contract.numerics != "none":
            after = copy_graph(gm, constants=True, like=remembered)
            self._latest = Rewrite(item, kind, remembered, after, sites)
            self._rewrites.setdefault(kind, []).append(self._latest)

    def to_be_partitioned(self, joint: fx.GraphModule) -> None:
        """Remember the joint graph that the partitioner gets."""
        self._joint = copy_graph(joint, constants=True, like=self._latest.after if self._latest else None)

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Remember the forward and backward graph, to compare them as a pair with the joint graph."""
        if self._joint is None:
            return
        pair = joined_graph(
            self._joint, *(copy_graph(gm, constants=True, like=self._joint) for gm in (forward, backward))
        )
        if pair is None:
            log.debug("the partition is not checked by value: it hands random states over")
            return
        self._rewrites.setdefault("joint", []).append(Rewrite(None, "joint", self._joint, pair))

    def watch(
        self, kind: str, compiled: Callable[..., Any], instead: Callable[[StageError, Any], Any] | None
    ) -> Callable[..., Any]:
        """Wrap ``compiled`` so that its first calls are checked before they run.

        Args:
            kind: the kind of graph that was compiled.
            compiled: the compiled graph; takes one list of inputs.
            instead: called with the error and the graph before the wrong pass; returns what to run, or
                raises.
        """
        first_calls = FirstCalls(self, ("joint", "forward") if kind == "forward" else (kind,))
        running = compiled

        def run(inputs: list[Any]) -> Any:
            nonlocal running
            try:
                if first_calls.check_call(inputs):
                    self._report_verdicts()
            except ValueMismatchError as error:
                self._verdicts[error.graph or kind, error.pass_name] = f"wrong: {error.reason}"
                self._report_verdicts()
                if instead is None:
                    raise
                running = instead(error, first_calls.before_error)
            if getattr(running, "_boxed_call", False):
                return running(inputs)
            return running(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _report_verdicts(self) -> None:
        for observer in self.observers:
            observer.verdicts(self._verdicts)

    def rewrites(self, kind: str) -> list[Rewrite]:
        """Return the rewrites of graphs of one kind, in order."""
        return self._rewrites.get(kind, [])

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        """Compare one rewrite on one set of inputs.

        Raises:
            ValueMismatchError: the rewrite is wrong.
            Unsupported: the graph before cannot run on the inputs.
        """
        found = trial.mismatches(rewrite)
        if found:
            raise self.blame(rewrite, trial, found)
        said = "; ".join(["the same values", *trial.reference.unreachable])
        self._verdicts.setdefault((rewrite.kind, rewrite.name), said)

    def has_time(self, rewrite: Rewrite) -> bool:
        """Whether to try more made-up inputs: always, while there are any."""
        return True

    def cannot_examine(self, rewrite: Rewrite, why: str) -> None:
        """Report that a rewrite is not checked."""
        self._verdicts[rewrite.kind, rewrite.name] = f"not checked: {why}"
        log.warning("%s on the %s graph is not checked by value: %s", rewrite.name, rewrite.kind, why)

    def blame(self, rewrite: Rewrite, trial: Trial, found: list[Mismatch]) -> ValueMismatchError:
        """Make the error for a wrong rewrite, with the match site or calls to blame, and a repro file.

        Args:
            rewrite: the pass and its graphs.
            trial: the inputs on which it is wrong.
            found: the results that differ.
        """
        item, inputs, where, traced = rewrite.item, trial.reference.inputs, trial.where, trial.traced
        location = locate_suspect(rewrite.before, rewrite.after, found[0].calls) or first_difference(
            rewrite.before, rewrite.after, inputs
        )
        how = f"{describe_mismatches(found)}, on {where}"
        if item is None:
            return ValueMismatchError(
                how, location, pass_name="partition", graph=rewrite.kind, mismatches=found
            )
        known = trial.reference.windows if trial.reference.samples else None
        sites, timed_out = guilty_sites(
            item, rewrite.before, rewrite.kind, rewrite.sites, inputs, rewrite.bitwise, found[0].calls, known
        )
        site = ""
        near = [site for site in sites if site.location.node in found[0].calls] or sites
        if sites:
            named = "; ".join(map(str, sites[:_MOST_NAMED])) + "; and others" * (len(sites) > _MOST_NAMED)
            count = f"{len(sites)} or more" if timed_out and len(sites) < len(rewrite.sites) else len(sites)
            site = f"{count} of {len(rewrite.sites)} match sites: {named}"
            location = near[0].location if len(near) == 1 else location
        else:
            site = _changed_subgraph(rewrite, location)
        with_others = self._partners(rewrite, inputs)
        error = ValueMismatchError(
            how,
            location,
            pass_name=item.name,
            graph=rewrite.kind,
            mismatches=found,
            sites=sites,
            site=site,
            partners=[other.name for other in with_others],
        )
        suspects = {location.node, *(site.location.node for site in near)}
        self._write_repro(
            error, rewrite, rewrite.after, inputs, traced, suspects, found[0].fault, with_others
        )
        return error

    def _partners(self, rewrite: Rewrite, inputs: list[Any]) -> tuple[Pass, ...]:
        """Return the earlier passes that contribute to the fault of this one."""
        assert rewrite.item is not None
        mine = self._rewrites[rewrite.kind]
        number = next((i for i, other in enumerate(mine) if other is rewrite), 0)
        earlier = [other.item for other in mine[:number] if other.item is not None]
        start = mine[0].before
        return partners(rewrite.item, earlier, start, rewrite.before, rewrite.kind, inputs, rewrite.bitwise)

    def explain(self, error: PassError) -> None:
        """Add a repro file to the error of a pass that raised or left a malformed graph."""
        if self._latest is None or self._latest.item is None or self._latest.item.name != error.pass_name:
            return
        fault = "structure" if isinstance(error, StructureError) else "error"
        try:
            with outside_tracing():
                inputs = inputs_from_hints(placeholders(self._latest.before))
                Reference(self._latest.before, inputs).native  # noqa: B018  (it has to run)
        except Unsupported as reason:
            log.info("there is no repro file: %s", reason)
            return
        with outside_tracing():
            self._write_repro(error, self._latest, None, inputs, None, {error.location.node}, fault)

    def explain_partition(self, error: ValueMismatchError, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Add a repro file to the error of a wrong partition.

        Args:
            error: the error.
            gm: Dynamo's graph.
            inputs: its inputs.
        """
        file, calls, why = stage_repro(gm, inputs, "partition", self._directory)
        if file:
            error.add_repro(file, calls)
        else:
            log.warning("there is no repro file for the partition: %s", why)

    def _write_repro(
        self,
        error: PassError,
        rewrite: Rewrite,
        after: fx.GraphModule | None,
        inputs: list[Any],
        traced: Sequence[Any] | None,
        suspects: set[str],
        fault: str,
        with_others: Sequence[Pass] = (),
    ) -> None:
        item = rewrite.item
        assert item is not None
        headline = f"Pass {item.name!r} is wrong on a {rewrite.kind} graph: {error.reason}."

        def attempt(
            before: fx.GraphModule,
            after: fx.GraphModule | None,
            inputs: list[Any],
            earlier: Sequence[Pass] = (),
        ) -> tuple[Path | None, int, str]:
            """Returns what :func:`make_repro` does. Args: the graph before and after the passes ``earlier`` and the wrong one, and inputs."""
            try:
                return make_repro(
                    item,
                    before,
                    after,
                    inputs,
                    traced,
                    suspects,
                    fault,
                    rewrite.bitwise,
                    self._directory,
                    headline,
                    earlier,
                )
            except OSError as failure:
                return None, 0, f"the file cannot be written: {failure}"

        file, calls, why = None, 0, ""
        for inner in inner_rewrites(rewrite.before, after, inputs) if after is not None else ():
            if file is None:
                file, calls, why = attempt(inner.before, inner.after, inner.inputs)
        if file is None:
            file, calls, why = attempt(rewrite.before, after, inputs)
        if file is None and with_others:
            start = self._rewrites[rewrite.kind][0].before
            file, calls, why = attempt(start, None, inputs, with_others)
        if file is None:
            log.warning("there is no repro file for pass %r: %s", item.name, why)
            return
        progress.note("repro", str(file))
        error.add_repro(str(file), calls)


def _changed_subgraph(rewrite: Rewrite, location: Location) -> str:
    """Describe the changed subgraph with the node to blame, for a pass that claims no sites."""
    before, after = rewrite.before, rewrite.after
    found = changes(before, after, changed_nodes(before, after))
    for number, change in enumerate(found):
        if location.node in change.names:
            return f"subgraph {number + 1} of {len(found)} that changed ({len(change.names)} nodes)"
    return ""
