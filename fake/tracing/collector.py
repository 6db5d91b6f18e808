"""Fewer runs of the garbage collector while a model is traced.

Tracing makes hundreds of thousands of objects that live until it ends, and Python's collector looks at them again and
again: a tenth of the time. :class:`RarerCollection` raises the collector's first two thresholds, so that it still runs,
and puts them back.

At the end of a compilation torch has the young objects looked at once more. Those that stay are then enough for a full collection,
over all the objects of the process, in the middle of the first step: a third of a second, as long as ten layers take to compile.
It is postponed until it is due by the number of younger collections again.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["RarerCollection"]


class RarerCollection:
    """The one owner of the collector's thresholds while someone asks for rarer collections.

    A program that has turned the collector off, or made it rarer itself, is left alone, and so are thresholds that are
    changed meanwhile.
    """

    OBJECTS = 50_000
    """How many more objects there must be than at the last collection (Python's own value is 700)."""

    YOUNG_COLLECTIONS = 50
    """After how many of those the objects that survived one are looked at again (Python's own value is 10)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before: tuple[int, int, int] | None = None
        self._ours: tuple[int, int, int] | None = None

    def acquire(self) -> None:
        """Make collections rarer until as many calls of :meth:`release`."""
        with self._lock:
            self._holders += 1
            thresholds = gc.get_threshold()
            if self._holders == 1 and 0 < thresholds[0] < self.OBJECTS:
                second = max(thresholds[1], self.YOUNG_COLLECTIONS)
                self._before, self._ours = thresholds, (self.OBJECTS, second, thresholds[2])
                gc.set_threshold(*self._ours)

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                if gc.get_threshold() == self._ours:
                    gc.set_threshold(*self._before)
                    _postpone_full_collection()
                self._before = self._ours = None


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
