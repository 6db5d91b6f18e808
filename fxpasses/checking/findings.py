"""Collect what the value check finds wrong with one rewrite on given inputs, instead of raising it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpasses.checking.checked_calls import FirstCalls, Rewrite, Trial
from fxpasses.checking.comparison.values import Mismatch
from fxpasses.checking.execution.inputs import is_tangent, placeholders
from fxpasses.checking.faults.blame import guilty_sites


@dataclass(frozen=True)
class Finding:
    """A fault of a rewrite.

    Attributes:
        mismatch: the result, and how it differs.
        where: the inputs, in words.
        sites: positions of the match sites to blame, if there are several.
    """

    mismatch: Mismatch
    where: str
    sites: tuple[int, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether the function is the same and only precision is lost."""
        return self.mismatch.rounds

    def __str__(self) -> str:
        return f"{self.mismatch}, on {self.where}"


def findings(
    rewrite: Rewrite, inputs: Sequence[Any], is_relevant: Callable[[Mismatch], bool] = lambda _: True
) -> tuple[list[Finding], list[str]]:
    """Check a rewrite as ``check="values"`` does on a first call, until something is wrong.

    Args:
        rewrite: the graphs, and who made one from the other.
        inputs: of both; gradients of outputs are made up.
        is_relevant: whether a mismatch matters.

    Returns:
        The faults, wrong values before losses of precision, and the reasons why the rewrite could not be
        checked, if any.
    """
    nodes = placeholders(rewrite.before)
    collector = _FindingCollector(rewrite, is_relevant)
    is_backward = rewrite.kind == "backward"
    given = [v for n, v in zip(nodes, inputs, strict=True) if is_backward or not is_tangent(n)]
    FirstCalls(collector, (rewrite.kind,)).check_call(given)
    return sorted(collector.found, key=lambda finding: finding.rounds), collector.unchecked_reasons


class _FindingCollector:
    """An :class:`.Examiner` that keeps what it finds."""

    def __init__(self, rewrite: Rewrite, is_relevant: Callable[[Mismatch], bool]) -> None:
        self._rewrite, self._is_relevant = rewrite, is_relevant
        self._known: set[tuple[str, bool]] = set()
        self.found: list[Finding] = []
        self.unchecked_reasons: list[str] = []

    def rewrites(self, kind: str) -> list[Rewrite]:
        return [self._rewrite]

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        if not self.has_time(rewrite):
            return
        for mismatch in filter(self._is_relevant, trial.mismatches(rewrite)):
            kind = mismatch.value, mismatch.rounds
            if kind not in self._known:
                self._known.add(kind)
                self.found.append(
                    Finding(mismatch, trial.where, self._sites_to_blame(rewrite, trial, mismatch))
                )

    def _sites_to_blame(self, rewrite: Rewrite, trial: Trial, mismatch: Mismatch) -> tuple[int, ...]:
        item, sites = rewrite.item, rewrite.sites
        if item is None or len(sites) < 2:
            return ()
        mine = tuple(site.index for site in sites if site.location.node in mismatch.calls)
        # A window loses precision whatever the rest of the graph does.
        if mismatch.rounds and len(mine) == 1:
            return mine
        if self.found:
            return ()
        inputs, bitwise = trial.reference.inputs, rewrite.bitwise
        guilty, _ = guilty_sites(item, rewrite.before, rewrite.kind, sites, inputs, bitwise, mismatch.calls)
        return tuple(site.index for site in guilty)

    def has_time(self, rewrite: Rewrite) -> bool:
        return all(finding.rounds for finding in self.found)

    def cannot_examine(self, rewrite: Rewrite, why: str) -> None:
        self.unchecked_reasons.append(why)
