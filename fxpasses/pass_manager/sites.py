"""Match sites: the subgraphs that a pass rewrites, numbered so that each can be named and skipped.

A pass claims a site before it rewrites it::

    if not claim(node):
        continue

Outside of a pass manager, every claim succeeds. The manager records the claims. A search for a wrong rewrite
runs the pass again with some of its sites refused. The order in which a pass claims its sites must depend
on the graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import fx

from fake.wrong_arguments import check_type
from fxpasses.errors import Location
from fxpasses.graphs.provenance import locate


@dataclass(frozen=True)
class MatchSite:
    """One subgraph that a pass wanted to rewrite.

    Attributes:
        index: its position among the sites of this run of the pass, starting at 0.
        location: the node and the user's source line.
        applied: whether the pass was allowed to rewrite it.
    """

    index: int
    location: Location
    applied: bool

    def __str__(self) -> str:
        return f"site {self.index}: {self.location}"


@dataclass
class Sites:
    """The match sites of one run of one pass, in the order in which they were claimed."""

    allowed: Callable[[int], bool]
    claimed: list[MatchSite] = field(default_factory=list)
    made_at: dict[fx.Node, int] = field(default_factory=dict)
    """For each node created after a site was claimed, the index of that site."""

    def made(self, node: fx.Node) -> None:
        """Attribute ``node`` to the most recently claimed site."""
        if self.claimed:
            self.made_at[node] = self.claimed[-1].index

    @property
    def applied(self) -> int:
        """Number of sites that were rewritten."""
        return sum(site.applied for site in self.claimed)


_current: ContextVar[Sites | None] = ContextVar("sites", default=None)


def claim(node: fx.Node) -> bool:
    """Whether the running pass may rewrite the match site that ``node`` identifies."""
    check_type("claim", "node", node, fx.Node, "a node of the graph that the pass rewrites")
    sites = _current.get()
    if sites is None:
        return True
    index = len(sites.claimed)
    allowed = sites.allowed(index)
    sites.claimed.append(MatchSite(index, locate(node), allowed))
    return allowed


@contextmanager
def collect_sites(allowed: Callable[[int], bool] = lambda index: True) -> Iterator[Sites]:
    """Record the sites claimed in this block, and refuse those whose index is not ``allowed``.

    >>> from torch import fx
    >>> graph = fx.Graph()
    >>> nodes = [graph.placeholder(name) for name in "abc"]
    >>> with collect_sites(lambda index: index != 1) as sites:
    ...     [claim(node) for node in nodes]
    [True, False, True]
    >>> sites.applied, str(sites.claimed[1])
    (2, "site 1: node 'b' (b)")
    """
    sites = Sites(allowed)
    token = _current.set(sites)
    try:
        yield sites
    finally:
        _current.reset(token)
