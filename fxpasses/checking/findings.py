"""What the value check finds of one rewrite, on inputs that are at hand: kept, not raised in a compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpasses.checking.blame import guilty_sites
from fxpasses.checking.checked_calls import FirstCalls, Rewrite, Trial
from fxpasses.checking.inputs import placeholders
from fxpasses.checking.values import Mismatch, is_tangent


@dataclass(frozen=True)
class Finding:
    """What is wrong with a rewrite.

    Attributes:
        mismatch: the result, and how it differs.
        where: the inputs, in words.
        sites: positions of the match sites that are to blame, of several.
    """

    mismatch: Mismatch
    where: str
    sites: tuple[int, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether it is the same function, and digits are lost."""
        return self.mismatch.rounds

    def __str__(self) -> str:
        return f"{self.mismatch}, on {self.where}"


def findings(
    rewrite: Rewrite, inputs: Sequence[Any], counts: Callable[[Mismatch], bool] = lambda _: True
) -> tuple[list[Finding], list[str]]:
    """Look at a rewrite as ``check="values"`` does on a first call, until something is wrong.

    Args:
        rewrite: the graphs, and who made one of the other.
        inputs: of both; gradients of outputs are made up.
        counts: whether a mismatch matters.

    Returns:
        What is wrong, of results that are another value before those that have lost digits; and why it was not looked at, where it was not.
    """
    nodes = placeholders(rewrite.before)
    keeper = _Keeper(rewrite, counts)
    is_backward = rewrite.kind == "backward"
    given = [v for n, v in zip(nodes, inputs, strict=True) if is_backward or not is_tangent(n)]
    FirstCalls(keeper, (rewrite.kind,)).look(given)
    return sorted(keeper.found, key=lambda finding: finding.rounds), keeper.why


class _Keeper:
    """Who is shown the rewrite on each set of inputs."""

    def __init__(self, rewrite: Rewrite, counts: Callable[[Mismatch], bool]) -> None:
        self._rewrite, self._counts = rewrite, counts
        self._known: set[tuple[str, bool]] = set()
        self.found: list[Finding] = []
        self.why: list[str] = []

    def rewrites(self, kind: str) -> list[Rewrite]:
        return [self._rewrite]

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        if not self.has_time(rewrite):
            return
        for mismatch in filter(self._counts, trial.mismatches(rewrite)):
            kind = mismatch.value, mismatch.rounds
            if kind not in self._known:
                self._known.add(kind)
                self.found.append(Finding(mismatch, trial.where, self._sites(rewrite, trial, mismatch)))

    def _sites(self, rewrite: Rewrite, trial: Trial, mismatch: Mismatch) -> tuple[int, ...]:
        item, sites = rewrite.item, rewrite.sites
        if item is None or len(sites) < 2:
            return ()
        mine = tuple(site.index for site in sites if site.location.node in mismatch.calls)
        # Digits are lost in a window, whatever the rest of the graph does.
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
        self.why.append(why)
