"""Run the garbage collector's full collections less often while a model is traced.

Tracing makes hundreds of thousands of objects that live until it ends, and full collections traverse all of
them repeatedly, which takes a tenth of the time. So the third threshold is raised, as Dynamo in torch 2.15
does for its own compilations. The first two stay: traversing fifty thousand young objects at once costs more
than traversing seven hundred of them seventy times, while they are still in the processor's cache. A program
that has turned the collector off is left alone, and so are thresholds that are changed in the meantime.

At the end of a compilation torch has the young objects collected once more. The survivors are then enough to
trigger a full collection, over all objects of the process, in the middle of the first step: a third of a
second, as long as ten layers take to compile. It is postponed until the number of younger collections makes
it due again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

from fake.seam.patches import LEDGER, Edit, When

YOUNG_COLLECTIONS = 1_000
"""The number of collections of younger objects before a full collection (Python's default is 10)."""


def _raise_thresholds() -> Callable[[], None]:
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
    """Restart the collector's counts, if it has just collected the objects of the compilation.

    Freezing and unfreezing all objects moves them to the oldest generation, where survivors of a collection
    already are, and resets the counts without traversing any object. What a program has frozen permanently
    stays frozen.
    """
    _, young_collections, _ = gc.get_count()
    if young_collections == 0 and gc.get_freeze_count() < _MIN_FROZEN_BY_PROGRAM:
        gc.freeze()
        gc.unfreeze()


_MIN_FROZEN_BY_PROGRAM = 2_000
"""A program that freezes its objects freezes all of them, and Python makes some five thousand before it runs
a line. Python 3.12 itself freezes a few hundred that are never freed, and does so again at the next
collection."""

(RARER_COLLECTIONS,) = LEDGER.add(
    Edit(
        "Python's garbage collector: its thresholds",
        _raise_thresholds,
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
    """Pause garbage collection inside the block, for work that makes many lasting
    objects and runs no user code."""
    return LEDGER.in_force(_PAUSE)
