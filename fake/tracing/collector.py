"""Fewer full runs of the garbage collector while a model is traced.

Tracing makes hundreds of thousands of objects that live until it ends, and a full collection looks at them all, again and
again: a tenth of the time. So the third threshold is raised, as Dynamo of torch 2.15 does for its own compilations. The first two stay: to look at
fifty thousand young objects at once costs more than to look at seven hundred of them seventy times, which are still in the processor's cache.
A program that has turned the collector off is left alone, and so are thresholds that are changed meanwhile.

At the end of a compilation torch has the young objects looked at once more. Those that stay are then enough for a full collection,
over all the objects of the process, in the middle of the first step: a third of a second, as long as ten layers take to compile.
It is postponed until it is due by the number of younger collections again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

from fake.seam.patches import LEDGER, Edit, When

YOUNG_COLLECTIONS = 1_000
"""After how many collections of the younger objects all are looked at (Python's own value is 10)."""


def _make_rarer() -> Callable[[], None]:
    before = gc.get_threshold()
    if before[0] == 0:
        return lambda: None
    ours = (*before[:2], max(before[2], YOUNG_COLLECTIONS))
    gc.set_threshold(*ours)

    def undo() -> None:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
            _postpone_full_collection()

    return undo


def _postpone_full_collection() -> None:
    """Have the collector count from zero, if it has just looked at the objects of the compilation.

    To freeze all objects and to thaw them moves them among the old ones, where survivors of a collection are already, and
    resets the counts; it looks at no object. What a program has frozen for good stays frozen.
    """
    _, young_collections, _ = gc.get_count()
    if young_collections == 0 and gc.get_freeze_count() < _FROZEN_BY_A_PROGRAM:
        gc.freeze()
        gc.unfreeze()


_FROZEN_BY_A_PROGRAM = 2_000
"""A program that freezes its objects freezes them all, of which Python makes some five thousand before it runs a line. Python 3.12
itself freezes a few hundred that are never freed, and does so again at the next collection."""

(RARER_COLLECTIONS,) = LEDGER.add(
    Edit(
        "Python's garbage collector: its thresholds",
        _make_rarer,
        when=When.COMPILATION,
        versions=None,
        lost="time: the collector looks again and again at what a compilation makes and keeps",
    )
)


def _pause() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


(_PAUSE,) = LEDGER.add(
    Edit(
        "Python's garbage collector: paused",
        _pause,
        when=When.CAPTURE,
        versions=None,
        lost="time: the capture of a long backward pass takes time that grows with the square of its length",
    )
)


def collection_paused() -> contextlib.AbstractContextManager[None]:
    """No garbage collection inside the block: for work that makes many objects that stay, and runs no user code."""
    return LEDGER.in_force(_PAUSE)
